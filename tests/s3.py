"""A server that speaks S3, on a free port of this machine: moto's, with buckets in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from moto.server import ThreadedMotoServer


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server without buckets."""
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


def s3_variables(address: str) -> dict[str, str]:
    """The environment in which clients find the server and what it takes for credentials."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
