# Images of the service for machines without a GPU (target cpu, the default), with NVIDIA GPUs (target gpu), and for nodes
# of a Ray cluster (targets ray and ray-gpu):
#
#     docker build --target cpu -t tessera:cpu .
#     docker build --target gpu -t tessera:gpu .
#     docker build --target ray -t tessera:ray .
#
# docs/operations.md explains how to run them and how to build behind a mirror, docs/decisions/0008-images.md the
# decisions, 0038-lock-file.md the requirements. There is no `# syntax=` line: it would fetch an image that a mirror may
# not have.

# Any image based on Debian or Ubuntu; its Python, if it has one, must be 3.11 or newer.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS base
# CUDA's and the distributions' images have no Python. Packages have no versions here and below: the base's tag determines
# them, and a distribution's mirror drops a version when there is a newer one.
# hadolint ignore=DL3008
RUN if ! command -v python3 > /dev/null; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends ca-certificates python3 \
      && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log; \
    fi


# The environment of the service without pip, and one of tools that no image contains.
FROM base AS builder
# hadolint ignore=DL3008
RUN if ! python3 -c "import ensurepip"; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends python3-venv \
      && rm -rf /var/lib/apt/lists/*; \
    fi
# If empty, the secret pip.conf (for an index with a password) or pip's default determines the index.
ARG PIP_INDEX_URL=
ENV PIP_INDEX_URL=$PIP_INDEX_URL \
    PIP_CACHE_DIR=/build/.cache/pip \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY deploy/requirements requirements
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv --without-pip /opt/tessera \
    && python3 -m venv /build/tools \
    && /build/tools/bin/pip install --no-deps --require-hashes --requirement requirements/tools.txt
ENV PATH=/opt/tessera/bin:/build/tools/bin:$PATH


FROM builder AS packages
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip --python /opt/tessera/bin/python install --no-deps --require-hashes --requirement requirements/service.txt \
    && packages="$(echo /opt/tessera/lib/python3*/site-packages)" \
    && find "$packages/mpmath" "$packages/networkx" "$packages/numpy" "$packages/setuptools" "$packages/sympy" \
        -type d -name tests -prune -exec rm -r {} +


# PyTorch has no hashes: each index has builds of its own. Its headers and tests are for the development of extensions: 200
# MB in some builds.
FROM packages AS packages-cpu
# PyPI's PyTorch for Linux includes gigabytes of CUDA libraries.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip --python /opt/tessera/bin/python install --no-deps --index-url "$TORCH_INDEX_URL" \
        --requirement requirements/torch-cpu.txt \
    && torch="$(echo /opt/tessera/lib/python3*/site-packages/torch)" \
    && rm -rf "$torch/include" "$torch/test" "$torch"/lib/*_test.so \
    && find "$torch/bin" -type f ! -name torch_shm_manager -delete \
    && python -c "import sys, torch; sys.exit(torch.version.cuda and 'TORCH_INDEX_URL has no CPU build of PyTorch')"


FROM packages AS packages-gpu
# If empty, PyTorch comes from the same index as all other packages.
ARG TORCH_INDEX_URL=
# With its dependencies: it pins NVIDIA's libraries itself, and all others are there.
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    PIP_EXTRA_INDEX_URL="$TORCH_INDEX_URL" \
    pip --python /opt/tessera/bin/python install --requirement requirements/torch-gpu.txt \
    && torch="$(echo /opt/tessera/lib/python3*/site-packages/torch)" \
    && rm -rf "$torch/include" "$torch/test" "$torch"/lib/*_test.so \
    && find "$torch/bin" -type f ! -name torch_shm_manager -delete \
    && python -c "import torch"


FROM builder AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY deploy/build_hook.py deploy/
COPY deploy/package deploy/package
COPY kernels kernels
COPY model model
COPY server server
RUN pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /dist .


FROM packages-cpu AS app-cpu
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    --mount=type=bind,from=wheel,source=/build/pyproject.toml,target=/build/pyproject.toml \
    pip --python /opt/tessera/bin/python install --no-cache-dir --no-deps --no-index /dist/*.whl \
    && pip --python /opt/tessera/bin/python check \
    && tessera --version \
    && cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
        --output-file /opt/tessera/sbom.json /opt/tessera/bin/python


FROM packages-gpu AS app-gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && { test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
         || apt-get install --yes --no-install-recommends libpython3-dev; } \
    && rm -rf /var/lib/apt/lists/*
# If something that Triton needs to compile is missing, fail here and not at a user's first request.
RUN nvidia="$(python -c 'import triton.backends.nvidia as it; print(it.__path__[0])')" \
    && headers="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    && gcc -shared -fPIC -I"$nvidia/include" -I"$headers" -o /dev/null "$nvidia/driver.c"
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    --mount=type=bind,from=wheel,source=/build/pyproject.toml,target=/build/pyproject.toml \
    pip --python /opt/tessera/bin/python install --no-cache-dir --no-deps --no-index /dist/*.whl \
    && pip --python /opt/tessera/bin/python check \
    && tessera --version \
    && cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
        --output-file /opt/tessera/sbom.json /opt/tessera/bin/python
# Kernels of these models, the bundled one or shapes of `tessera bench engine`, for these GPUs (tessera warmup --arch), so
# that no container compiles them: with all of them about 230 MB, and up to an hour on two processors. Empty for none.
ARG COMPILED_MODELS="bundled smollm2-135m smollm2-360m qwen2.5-0.5b qwen2.5-1.5b qwen3-0.6b qwen3-1.7b qwen3-4b \
llama-3.2-1b llama-3.2-3b llama-3.1-8b tinyllama-1.1b mistral-7b gemma-3-1b"
ARG COMPILED_GPUS="sm_80 sm_86 sm_89 sm_90"
RUN mkdir /opt/tessera/compiled-kernels \
    && for gpu in $COMPILED_GPUS; do for model in $COMPILED_MODELS; do \
         HOME=/tmp tessera warmup --arch "$gpu" --model "$model" --output /opt/tessera/compiled-kernels || exit 1; \
       done; done


FROM app-cpu AS app-ray
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheel,source=/build/pyproject.toml,target=/build/pyproject.toml \
    pip --python /opt/tessera/bin/python install --no-deps --require-hashes --requirement requirements/ray.txt \
    && pip --python /opt/tessera/bin/python check \
    && python -c "import tessera.server.ray.app" \
    && cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
        --output-file /opt/tessera/sbom.json /opt/tessera/bin/python


FROM app-gpu AS app-ray-gpu
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheel,source=/build/pyproject.toml,target=/build/pyproject.toml \
    pip --python /opt/tessera/bin/python install --no-deps --require-hashes --requirement requirements/ray.txt \
    && pip --python /opt/tessera/bin/python check \
    && python -c "import tessera.server.ray.app" \
    && cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
        --output-file /opt/tessera/sbom.json /opt/tessera/bin/python


FROM base AS runtime-cpu
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
ENV TESSERA_DEVICE=cpu


FROM runtime-cpu AS runtime-gpu
# Triton compiles a small C file for each kernel's launch, with gcc, the C library, Python.h of the base and its own
# cuda.h. Triton includes ptxas, PyTorch the CUDA libraries; the host provides the driver at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && { test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
         || apt-get install --yes --no-install-recommends libpython3-dev; } \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
# Without a GPU this image must fail to start instead of being slow.
ENV TESSERA_DEVICE=cuda \
    TESSERA_COMPILED_KERNELS=/opt/tessera/compiled-kernels \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility


FROM runtime-gpu AS gpu
COPY --from=app-gpu /opt/tessera /opt/tessera
USER 10001:10001
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tessera" \
      org.opencontainers.image.description="A text-generation server for small decoder models, for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.revision="$REVISION"


FROM runtime-cpu AS ray
# The proxies start with Ray, so that these must be set on every node before it (docs/operations.md). Ray writes a
# token to its user's home, which must be writable on a read-only root.
ENV RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
    RAY_SERVE_HAPROXY_RETRY_ON="conn-failure empty-response" \
    RAY_SERVE_HAPROXY_RETRIES=20 \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/tessera/bin/tessera-haproxy \
    RAY_SERVE_HAPROXY_TUNE_BUFSIZE=131072 \
    RAY_USAGE_STATS_ENABLED=0 \
    HOME=/tmp
COPY --from=app-ray /opt/tessera /opt/tessera
# One node with one replica, which drains at SIGTERM. An operator of clusters replaces the command by `ray start`.
ENTRYPOINT []
CMD ["python", "-m", "tessera.server.ray.main", "host=0.0.0.0"]
USER 10001:10001
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tessera" \
      org.opencontainers.image.description="A text-generation server for small decoder models, as replicas on Ray Serve" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.revision="$REVISION"


FROM runtime-gpu AS ray-gpu
# The proxies start with Ray, so that these must be set on every node before it (docs/operations.md). Ray writes a
# token to its user's home, which must be writable on a read-only root.
ENV RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
    RAY_SERVE_HAPROXY_RETRY_ON="conn-failure empty-response" \
    RAY_SERVE_HAPROXY_RETRIES=20 \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/tessera/bin/tessera-haproxy \
    RAY_SERVE_HAPROXY_TUNE_BUFSIZE=131072 \
    RAY_USAGE_STATS_ENABLED=0 \
    HOME=/tmp
COPY --from=app-ray-gpu /opt/tessera /opt/tessera
# One node with one replica, which drains at SIGTERM. An operator of clusters replaces the command by `ray start`.
ENTRYPOINT []
CMD ["python", "-m", "tessera.server.ray.main", "host=0.0.0.0"]
USER 10001:10001
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tessera" \
      org.opencontainers.image.description="A text-generation server for small decoder models, as replicas on Ray Serve" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.revision="$REVISION"


# The last stage is built if no target is given.
FROM runtime-cpu AS cpu
COPY --from=app-cpu /opt/tessera /opt/tessera
USER 10001:10001
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tessera" \
      org.opencontainers.image.description="A text-generation server for small decoder models, for CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.revision="$REVISION"
