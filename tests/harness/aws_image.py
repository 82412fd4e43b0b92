"""moto publishes no Deep Learning images: their SSM parameter, put into this process's moto as AWS
has it.
"""

from datetime import UTC, datetime

from moto.core import DEFAULT_ACCOUNT_ID
from moto.ssm.models import Parameter, ssm_backends

BASE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


def publish_base_image(image: str, region: str = "us-east-1") -> None:
    """`image` is the newest one of the region from now on."""
    parameter = Parameter(
        DEFAULT_ACCOUNT_ID, BASE, image, "String", None, None, None, datetime.now(UTC), 1, "text"
    )
    ssm_backends[DEFAULT_ACCOUNT_ID][region]._parameters[BASE].append(parameter)
