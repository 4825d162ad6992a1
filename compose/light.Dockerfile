# Router, orchestrator, collector and workers with simulated engines: neither vLLM nor torch is in here.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

RUN python -m venv /opt/baton \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin baton \
    && mkdir -p /home/baton/.cache /home/baton/.local/state \
    && chown -R baton /home/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/baton/source
COPY requirements/services.txt requirements/
RUN pip install --no-deps --require-hashes -r requirements/services.txt

COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY services services
COPY connector connector
RUN pip install --no-deps --no-build-isolation .

USER baton
WORKDIR /home/baton
