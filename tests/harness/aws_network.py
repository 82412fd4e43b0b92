"""A private subnet with a NAT gateway in an account's default network, as EFA nodes want one."""

from typing import Any


def make_private_subnet(
    ec2: Any, zone: str = "us-east-1d", cidr: str = "172.31.128.0/20", nat: bool = True
) -> str:
    """Its id. Without `nat` it has no way out."""
    (network,) = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    subnet = str(
        ec2.create_subnet(VpcId=network["VpcId"], CidrBlock=cidr, AvailabilityZone=zone)["Subnet"][
            "SubnetId"
        ]
    )
    table = ec2.create_route_table(VpcId=network["VpcId"])["RouteTable"]["RouteTableId"]
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    if nat:
        public = public_subnet(ec2)
        address = ec2.allocate_address(Domain="vpc")["AllocationId"]
        gateway = ec2.create_nat_gateway(SubnetId=public, AllocationId=address)["NatGateway"][
            "NatGatewayId"
        ]
        ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=gateway)
    return subnet


def public_subnet(ec2: Any) -> str:
    """One whose instances get public addresses."""
    answer = ec2.describe_subnets(Filters=[{"Name": "map-public-ip-on-launch", "Values": ["true"]}])
    return str(answer["Subnets"][0]["SubnetId"])
