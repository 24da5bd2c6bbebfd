# The service as an image, for a machine without a GPU (target cpu, the default) and one with NVIDIA's (target gpu):
#
#     docker build --target cpu -t tessera:cpu .
#     docker build --target gpu -t tessera:gpu .
#
# docs/operations.md tells how to run them and how to build behind a mirror, docs/decisions/0008-images.md why they are
# as they are. There is no `# syntax=` line: it would fetch an image that a mirror may not have.

# Any image of Debian or Ubuntu; Python 3.11 or newer, if it has one.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS base
# CUDA's and the distributions' own images have no Python, or not all of it. Packages have no versions here and below:
# the base's tag settles them, and a distribution's mirror drops a version once there is a newer one.
# hadolint ignore=DL3008
RUN if ! python3 -c "import ensurepip"; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends ca-certificates libpython3-dev python3 python3-venv \
      && rm -rf /var/lib/apt/lists/*; \
    fi


# What pyproject.toml asks for, as files: a change of anything else in it installs nothing again.
FROM base AS requirements
WORKDIR /requirements
COPY pyproject.toml .
RUN python3 -c "import tomllib; \
      project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
      print(*project['dependencies'], sep='\n', file=open('cpu.txt', 'w')); \
      print(*project['dependencies'], *project['optional-dependencies']['gpu'], sep='\n', file=open('gpu.txt', 'w'))" \
    && grep --extended-regexp '^torch\b' cpu.txt > torch.txt


FROM base AS venv
# Empty leaves the choice to the secret pip.conf (an index with a password), or to pip.
ARG PIP_INDEX_URL=
ENV PIP_INDEX_URL=$PIP_INDEX_URL \
    PIP_CACHE_DIR=/build/.cache/pip \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/tessera
ENV PATH=/opt/tessera/bin:$PATH
WORKDIR /build


FROM venv AS venv-cpu
# PyPI's PyTorch for Linux brings gigabytes of CUDA.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY --from=requirements /requirements/torch.txt /requirements/cpu.txt ./
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    pip install --index-url "$TORCH_INDEX_URL" --requirement torch.txt \
    && pip install --requirement cpu.txt \
    && python -c "import sys, torch; sys.exit(torch.version.cuda and 'TORCH_INDEX_URL has no CPU build of PyTorch')"


FROM venv AS venv-gpu
# Empty takes PyTorch from where everything else comes from.
ARG TORCH_INDEX_URL=
COPY --from=requirements /requirements/gpu.txt ./
RUN --mount=type=cache,target=/build/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    PIP_EXTRA_INDEX_URL="$TORCH_INDEX_URL" pip install --requirement gpu.txt


FROM venv AS wheel
COPY pyproject.toml README.md LICENSE ./
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
# A volume takes its owner from these folders. Group 0 may write too, for platforms that pick a user of their own.
RUN groupadd --gid 10001 tessera \
    && useradd --uid 10001 --gid tessera --no-log-init --create-home tessera \
    && install --directory --owner=tessera --group=0 --mode=2775 /cache "$HF_HOME" "$TRITON_CACHE_DIR"
COPY deploy/healthcheck.py /opt/healthcheck.py
EXPOSE 8000
# At SIGTERM the service takes no more connections and gives those it has 30 seconds.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["python3", "/opt/healthcheck.py"]
ENTRYPOINT ["tessera", "serve"]


FROM runtime AS gpu
# Triton compiles a small C file for each kernel's launch: with gcc, against the C library, Python.h of the base, and
# cuda.h of its own. ptxas comes with it, CUDA's libraries with PyTorch, the driver from the host at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=venv-gpu /opt/tessera /opt/tessera
# Fails here, not at a user's first request, where something that Triton compiles with is missing.
RUN nvidia="$(python -c 'import triton.backends.nvidia as it; print(it.__path__[0])')" \
    && headers="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    && gcc -shared -fPIC -I"$nvidia/include" -I"$headers" -o /dev/null "$nvidia/driver.c"
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-cache-dir --no-deps --no-index /dist/*.whl && tessera --version
# Without a GPU this image should not start, rather than be slow.
ENV TESSERA_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tessera" \
      org.opencontainers.image.description="A text-generation server for small decoder models, for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="$REVISION"


# Last, and so what is built where no target is named.
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
