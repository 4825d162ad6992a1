# Workers with vLLM inside. Targets: `cpu` (a third party's build of vLLM's CPU backend) and `cuda` (upstream's wheel).
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
RUN python -m venv /opt/baton \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin baton \
    && mkdir -p /home/baton/.cache /home/baton/.local/state \
    && chown -R baton /home/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/baton/source

# No worker uses the router's native part, so this stage needs no compiler.
FROM base AS build
COPY requirements/services.txt requirements/
RUN sed -n '/^setuptools==/,/[^\\]$/p' requirements/services.txt > requirements/setuptools.txt \
    && pip install --no-deps --require-hashes -r requirements/setuptools.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY scripts/build_backend.py scripts/
COPY shared shared
COPY services services
COPY connector connector
COPY replay replay
ARG BATON_COMMIT
RUN _BATON_PURE=1 pip wheel --no-deps --no-build-isolation --wheel-dir /opt/wheels .

# `docker buildx build --build-context wheel=dist` takes the wheels of a release instead.
FROM scratch AS wheel
COPY --from=build /opt/wheels/*.whl /

FROM base AS cpu
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/engine-cpu.txt requirements/
# torch first: most package indexes lack its CPU build; PyTorch's own index has it.
RUN sed -n '/^torch==/,/[^\\]$/p' requirements/engine-cpu.txt > requirements/torch.txt \
    && { pip install --no-deps --require-hashes -r requirements/torch.txt \
         || pip install --no-deps --require-hashes -r requirements/torch.txt --extra-index-url "$TORCH_CPU_INDEX"; } \
    && pip install --no-deps --require-hashes -r requirements/engine-cpu.txt
COPY --from=wheel /*.whl /opt/wheels/
RUN pip install --no-deps --no-index --find-links /opt/wheels baton-serve
USER baton
WORKDIR /home/baton

FROM base AS cuda
# Triton compiles the launchers of its kernels at run time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# engine-cuda-0.33 has the next release of vLLM.
ARG ENGINE_LOCK=engine-cuda
COPY requirements/${ENGINE_LOCK}.txt requirements/
RUN pip install --no-deps --require-hashes -r "requirements/${ENGINE_LOCK}.txt"
COPY --from=wheel /*.whl /opt/wheels/
RUN pip install --no-deps --no-index --find-links /opt/wheels baton-serve
USER baton
WORKDIR /home/baton
