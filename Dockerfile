# Unison with the packages that it is tested with.
#
#   docker build --tag unison .                                        # for CPUs
#   docker build --tag unison:cuda --build-arg EXTRAS=demo,cuda13 .    # for NVIDIA GPUs
#   docker run --rm unison                                             # the demo
#   docker run --rm --gpus all --volume "$PWD":/job --workdir /job unison:cuda python train.py
#
# JAX's CUDA packages bring CUDA: the host needs a driver and NVIDIA's container toolkit. PYTHON
# chooses the tested set: 3.11, 3.12 or 3.13. `python -m release.dockerfile` runs all commands
# without Docker.
ARG PYTHON=3.13

# The large image has a C++ compiler.
FROM python:${PYTHON} AS build
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG PYTHON
ARG EXTRAS=demo
ENV KERAS_BACKEND=jax
ENV PIP_NO_CACHE_DIR=1
COPY constraints /constraints
COPY --from=build /wheels /wheels
RUN python -m pip install --constraint /constraints/jax*-python${PYTHON}.txt \
      "$(echo /wheels/*.whl)[${EXTRAS}]" \
    && rm -r /wheels
# Any user may run it.
WORKDIR /home/unison
RUN chmod 1777 /home/unison
ENV HOME=/home/unison
USER 1000:1000
CMD ["unison", "demo"]
