# Router, orchestrator, collector and workers with simulated engines, without vLLM and torch.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE} AS base

RUN python -m venv /opt/baton \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin baton \
    && mkdir -p /home/baton/.cache /home/baton/.local/state \
    && chown -R baton /home/baton
# New volumes get the owner of these folders: the keys that `baton init` creates, and the storage of NATS.
RUN cd / && mkdir -p data keys/ca keys/nats keys/router keys/orchestrator keys/collector keys/launcher keys/api \
       keys/of-prefill keys/of-decode keys/of-store keys/of-attached \
    && chown -R baton data keys
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/baton/source
COPY requirements/services.txt requirements/
RUN pip install --no-deps --require-hashes -r requirements/services.txt

# The router's request path and index are compiled in this stage, so the final image needs no compiler.
FROM base AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py README.md LICENSE ./
COPY scripts/build_backend.py scripts/
COPY shared shared
COPY services services
COPY connector connector
COPY replay replay
ARG BATON_COMMIT
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /opt/wheels .

# `docker buildx build --build-context wheel=dist` takes the wheels of a release instead.
FROM scratch AS wheel
COPY --from=build /opt/wheels/*.whl /

FROM base AS final
COPY --from=wheel /*.whl /opt/wheels/
# pip leaves out what it cannot compile, and says so only in its log.
RUN pip install --no-deps --no-index --find-links /opt/wheels baton-serve \
    && python -c "from baton_serve.services.router.native import _block_table, _placement; from baton_serve.shared import compiled; assert compiled.IN_USE"

USER baton
WORKDIR /home/baton
