# Training on NVIDIA GPUs:  docker build -f docker/train.Dockerfile -t specdraft .
#   docker run --gpus all --ipc host -v "$PWD/runs:/data/runs" -v "$HOME/.cache/huggingface:/data/hub" specdraft \
#     train model=eagle3 target=llama-8b trainer.devices=8
# The compiler and CUDA's headers are for DeepSpeed, which builds its operators when they are first used.
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04

RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ git \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
ENV HF_HOME=/data/hub SPECDRAFT_CACHE=/data/cache
RUN python3 -m venv /opt/venv

# The locked packages first: they change less often than the code, and stay in the image's cache.
COPY requirements/dev.lock /tmp/dev.lock
RUN pip install --no-cache-dir -r /tmp/dev.lock
COPY . /src
RUN pip install --no-cache-dir --no-deps --no-build-isolation /src

WORKDIR /data
ENTRYPOINT ["specdraft"]
CMD ["train", "--help"]
