# Images of the service for machines without a GPU (target cpu, the default) and with NVIDIA GPUs (target gpu):
#
#     docker build --target cpu -t tessera:cpu .
#     docker build --target gpu -t tessera:gpu .
#
# docs/operations.md explains how to run them and how to build behind a mirror, docs/decisions/0008-images.md the
# decisions. There is no `# syntax=` line: it would fetch an image that a mirror may not have.

# Any image based on Debian or Ubuntu; its Python, if it has one, must be 3.11 or newer.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS base
# CUDA's and the distributions' images have no Python, or an incomplete one. Packages have no versions here and below: the
# base's tag determines them, and a distribution's mirror drops a version when there is a newer one.
# hadolint ignore=DL3008
RUN if ! python3 -c "import ensurepip"; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends ca-certificates libpython3-dev python3 python3-venv \
      && rm -rf /var/lib/apt/lists/*; \
    fi


# The requirements of pyproject.toml as files, so that other changes to it do not install the packages again.
FROM base AS requirements
WORKDIR /requirements
COPY pyproject.toml .
RUN python3 -c "import tomllib; \
      project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
      print(*project['dependencies'], sep='\n', file=open('cpu.txt', 'w')); \
      print(*project['dependencies'], *project['optional-dependencies']['gpu'], sep='\n', file=open('gpu.txt', 'w'))" \
    && grep --extended-regexp '^torch\b' cpu.txt > torch.txt


FROM base AS venv
# If empty, the secret pip.conf (for an index with a password) or pip's default determines the index.
ARG PIP_INDEX_URL=
ENV PIP_INDEX_URL=$PIP_INDEX_URL \
    PIP_CACHE_DIR=/build/.cache/pip \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/tessera
ENV PATH=/opt/tessera/bin:$PATH
WORKDIR /build


FROM venv AS venv-cpu
# PyPI's PyTorch for Linux includes gigabytes of CUDA libraries.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY --from=requirements /requirements/torch.txt /requirements/cpu.txt ./
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --index-url "$TORCH_INDEX_URL" --requirement torch.txt \
    && pip install --requirement cpu.txt \
    && python -c "import sys, torch; sys.exit(torch.version.cuda and 'TORCH_INDEX_URL has no CPU build of PyTorch')"


FROM venv AS venv-gpu
# If empty, PyTorch comes from the same index as all other packages.
ARG TORCH_INDEX_URL=
COPY --from=requirements /requirements/gpu.txt ./
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    PIP_EXTRA_INDEX_URL="$TORCH_INDEX_URL" pip install --requirement gpu.txt


FROM venv AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY deploy/build_native.py deploy/
COPY kernels kernels
COPY model model
COPY server server
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip wheel --no-deps --wheel-dir /dist .


FROM base AS runtime
ENV PATH=/opt/tessera/bin:$PATH \
    TESSERA_HOST=0.0.0.0 \
    TESSERA_PORT=8000 \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
# A volume takes its owner from these folders. Group 0 may write too, for platforms that choose the user themselves.
RUN groupadd --gid 10001 tessera \
    && useradd --uid 10001 --gid tessera --no-log-init --create-home tessera \
    && install --directory --owner=tessera --group=0 --mode=2775 /cache "$HF_HOME" "$TRITON_CACHE_DIR"
COPY deploy/healthcheck.py /opt/healthcheck.py
EXPOSE 8000
# At SIGTERM new requests are refused and those in flight run for up to 30 seconds (--drain-delay, --drain-timeout). Docker
# kills after 10 seconds: `docker run --stop-timeout 50`. An image cannot set that.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["python3", "/opt/healthcheck.py"]
ENTRYPOINT ["tessera", "serve"]


FROM runtime AS gpu
# Triton compiles a small C file for each kernel's launch, with gcc, the C library, Python.h of the base and its own
# cuda.h. Triton includes ptxas, PyTorch the CUDA libraries; the host provides the driver at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=venv-gpu /opt/tessera /opt/tessera
# If something that Triton needs to compile is missing, fail here and not at a user's first request.
RUN nvidia="$(python -c 'import triton.backends.nvidia as it; print(it.__path__[0])')" \
    && headers="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    && gcc -shared -fPIC -I"$nvidia/include" -I"$headers" -o /dev/null "$nvidia/driver.c"
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-deps --no-index /dist/*.whl && tessera --version
# Kernels of these models, the bundled one or shapes of `tessera bench engine`, for these GPUs (tessera warmup --arch), so
# that no container compiles them: with all of them 200 MB, and up to an hour on two processors. Empty for none.
ARG COMPILED_MODELS="bundled smollm2-135m smollm2-360m qwen2.5-0.5b qwen2.5-1.5b qwen3-0.6b qwen3-1.7b qwen3-4b \
llama-3.2-1b llama-3.2-3b llama-3.1-8b tinyllama-1.1b mistral-7b"
ARG COMPILED_GPUS="a100 a10 l4 h100"
RUN mkdir /opt/tessera/compiled-kernels \
    && for gpu in $COMPILED_GPUS; do for model in $COMPILED_MODELS; do \
         HOME=/tmp tessera warmup --arch "$gpu" --model "$model" --output /opt/tessera/compiled-kernels || exit 1; \
       done; done
# Without a GPU this image must fail to start instead of being slow.
ENV TESSERA_DEVICE=cuda \
    TESSERA_COMPILED_KERNELS=/opt/tessera/compiled-kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tessera" \
      org.opencontainers.image.description="A text-generation server for small decoder models, for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="$REVISION"


# The last stage is built if no target is given.
FROM runtime AS cpu
COPY --from=venv-cpu /opt/tessera /opt/tessera
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-deps --no-index /dist/*.whl && tessera --version
ENV TESSERA_DEVICE=cpu
USER 10001:10001
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tessera" \
      org.opencontainers.image.description="A text-generation server for small decoder models, for CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="$REVISION"
