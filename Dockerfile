# syntax=docker/dockerfile:1
# An image for `fourfold launch kubernetes --image`, or for one machine.
#
#   docker build --tag fourfold:cuda .
#   docker build --tag fourfold:cpu --build-arg BASE=cpu .
ARG BASE=cuda

FROM python:3.12-slim AS cpu
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu

FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime AS cuda
# For compiled blocks: Triton builds a launcher for each kernel.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev && rm -rf /var/lib/apt/lists/*

FROM ${BASE}
# PyTorch's image has the Python of its distribution, into which pip installs only if told to (PEP 668).
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# Extras: data for Parquet and Hugging Face datasets, s3 for checkpoints in object stores.
ARG EXTRAS=data,s3
WORKDIR /opt/fourfold
COPY pyproject.toml README.md LICENSE ./
COPY src src
# torch is named again, so that pip keeps the build of the base image.
RUN pip install --no-cache-dir ".[${EXTRAS}]" torch==2.13.0
# /data is where `fourfold launch kubernetes --claim` mounts a volume.
RUN useradd --create-home fourfold && install --directory --owner fourfold /data
USER fourfold
WORKDIR /data
ENTRYPOINT ["fourfold"]
CMD ["--help"]
