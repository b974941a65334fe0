# CPU:  docker build -t unpad .          then  docker run -it --rm -v "$PWD/work:/work" -w /work unpad --help
# CUDA: docker build -t unpad --build-arg BASE=nvidia/cuda:12.6.3-devel-ubuntu24.04 \
#       --build-arg PACKAGES="openmpi-bin libopenmpi-dev libnccl-dev" --build-arg BACKEND=cuda .    and run with --gpus all
ARG BASE=debian:12
FROM $BASE
ARG BACKEND=cpu PACKAGES="openmpi-bin libopenmpi-dev"
RUN apt-get update && apt-get install -y --no-install-recommends make gcc g++ git python3 ca-certificates \
    libc6-dev libjansson-dev libpcre2-dev libunistring-dev libedit-dev $PACKAGES
COPY . /unpad
RUN make -C /unpad -j"$(nproc)" BACKEND=$BACKEND install
# mpirun refuses root without these
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ENTRYPOINT ["train_llama"]
