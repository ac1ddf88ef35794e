# syntax=docker/dockerfile:1
# Image of every pod: ringserve, Ray and torch, for CPUs or for NVIDIA GPUs.
#   docker build --target cpu  -t registry.example/ringserve:0.1.0-cpu .
#   docker build --target cuda -t registry.example/ringserve:0.1.0-cuda .
# --build-arg REVISION=$(git rev-parse HEAD) labels the image with its commit. Downloads stay in the builder's cache.
# Behind a mirror: --build-arg PIP_INDEX_URL=https://mirror.example/simple, and TORCH_CPU_INDEX for torch's CPU build.
# CUDA's libraries come with torch; a node needs the driver and NVIDIA's container runtime.

# BASE may name an image by its digest: --build-arg BASE=python@sha256:...
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS base
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    VIRTUAL_ENV=/venv \
    PATH=/venv/bin:$PATH

# torch is installed first and by its exact version; see docs/decisions/0002. g++ compiles the kernels of CPUs.
FROM base AS compiler
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

FROM compiler AS build-cpu
RUN python -m venv /venv
WORKDIR /src
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip pip install "$(grep '^torch==' constraints.txt)" -c constraints.txt --extra-index-url "$TORCH_CPU_INDEX"

FROM compiler AS build-cuda
RUN python -m venv /venv
WORKDIR /src
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip pip install "$(grep '^torch==' constraints.txt)" -c constraints.txt

# ray[default] has the agent for KubeRay's probes, which plain ray lacks.
FROM build-cpu AS install-cpu
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY cp_core cp_core
COPY workers workers
COPY orchestration orchestration
COPY services services
COPY proto proto
RUN --mount=type=cache,target=/root/.cache/pip pip install ./proto ".[otel]" "ray[default]" -c constraints.txt && pip check

FROM build-cuda AS install-cuda
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY cp_core cp_core
COPY workers workers
COPY orchestration orchestration
COPY services services
COPY proto proto
# NIXL has a package for each version of CUDA: that of torch's own is taken.
RUN --mount=type=cache,target=/root/.cache/pip pip install ./proto ".[otel,gpu]" "ray[default]" \
    "nixl-cu$(python -c 'import torch; print(torch.version.cuda.partition(".")[0])')" -c constraints.txt && pip check

# This stage takes only the environment from the build. KubeRay's probes call wget.
FROM base AS runtime
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 ringserve \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin ringserve
ARG REVISION=""
LABEL org.opencontainers.image.title="ringserve" \
      org.opencontainers.image.description="Exact serving of long contexts by rings of ranks" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}"
ENV HOME=/tmp
WORKDIR /tmp
ENTRYPOINT ["ringserve"]

# Triton compiles what starts its kernels, with the headers of Python that the base image has.
FROM runtime AS cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY --from=install-cuda /venv /venv
USER 10001:10001

FROM runtime AS cpu
COPY --from=install-cpu /venv /venv
USER 10001:10001
