# Dyad and all it needs to train:  docker build -t dyad .
#   --build-arg DEVICE=cpu         faiss for machines without a GPU; torch stays the one of PyPI, which brings CUDA (4 GB)
#   --build-arg TORCH_INDEX=URL    torch and torchvision from there, such as PyTorch's own index of wheels for the CPU
#   --build-arg EXTRAS="demo onnx" more extras of pyproject.toml
ARG BASE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BASE} AS base
ARG DEVICE=gpu
ARG EXTRAS=demo
ENV DYAD_VENV=/opt/dyad DYAD_FAISS=${DEVICE} DYAD_EXTRAS=${EXTRAS}
WORKDIR /dyad

# The dependencies alone: built anew only when the lock file changes, every file checked against its hash.
FROM base AS dependencies
ARG TORCH_INDEX
COPY pyproject.toml requirements.lock requirements.hashes ./
COPY launch/setup.sh launch/
RUN --mount=type=cache,target=/pip-cache \
    PIP_CACHE_DIR=/pip-cache DYAD_TORCH_INDEX=${TORCH_INDEX} bash launch/setup.sh ${DYAD_EXTRAS}

FROM base
# g++: Triton and torch.compile write code and compile it. tini: signals reach the trainer, which then saves. ibverbs and
# rdmacm: without them NCCL reaches other machines by TCP, ten times slower. numactl: torchrun binds processes with it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++=4:12.* tini=0.19.* \
        libibverbs1=44.* ibverbs-providers=44.* librdmacm1=44.* libnuma1=2.0.* numactl=2.0.* \
    && rm -rf /var/lib/apt/lists/*
COPY --from=dependencies /opt/dyad /opt/dyad
COPY . .
# The user may be any (docker run --user): it writes to /dyad/runs and to a home of its own below /cache, see entrypoint.sh.
RUN bash launch/setup.sh ${DYAD_EXTRAS} \
    && python -m compileall -q data eval train dyad \
    && install -d -m 1777 /cache runs
ENV HOME=/cache XDG_CACHE_HOME=/cache USER=dyad PYTHONUNBUFFERED=1
USER 1000:1000

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Dyad" \
    org.opencontainers.image.description="Distributed CLIP and DPR training with exact contrastive objectives" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["tini", "--", "bash", "/dyad/launch/entrypoint.sh"]
CMD ["doctor"]
