"""scripts/aws/prepare and bake against moto: what they make, once, and that a second time changes
nothing.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import redirect_stderr
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.stub import Stubber

from autohet.driver.sources import aws_errors
from autohet.driver.sources.sqs_queue import QueueNotices
from tests.harness.aws_image import BASE, publish_base_image
from tests.harness.aws_readme import BUCKET, SYSTEM, environment_missing, readme_commands
from tests.harness.aws_scripts import run_script
from tests.harness.notice_sources import Case, driver_now
from tests.harness.s3_server import s3_server
from tests.harness.waits import HANG_S, wait_until

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SHIPPED = f"resolve:ssm:{BASE}"
NOTICE = {"instance-id": "i-0123456789abcdef0", "instance-action": "terminate"}


def script(name: str, *arguments: str, **environment: str) -> dict[str, Any]:
    done = run_script(name, *arguments, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_prepare_makes_roles_bucket_and_a_queue_that_hears_ec2() -> None:
    publish_base_image("ami-now")
    with s3_server() as server:
        made = script("prepare", "--bucket", "runs", **server.environment)
        assert made["image"] == "ami-now"
        assert script("prepare", "--bucket", "runs", **server.environment) == made
        client = lambda service: boto3.client(  # noqa: E731
            service, endpoint_url=server.endpoint, region_name="us-east-1"
        )
        for name, policies in {
            "autohet-worker": ["worker-policy"],
            "autohet-driver": ["driver-policy", "worker-policy"],
            "autohet-head": ["driver-policy", "head-policy", "worker-policy"],
        }.items():
            profile = client("iam").get_instance_profile(InstanceProfileName=name)[
                "InstanceProfile"
            ]
            assert [role["RoleName"] for role in profile["Roles"]] == [name]
            assert (
                sorted(client("iam").list_role_policies(RoleName=name)["PolicyNames"]) == policies
            )
        assert (
            len(
                client("iam").list_roles(PathPrefix="/aws-service-role/spot.amazonaws.com/")[
                    "Roles"
                ]
            )
            == 1
        )
        worker = json.dumps(
            client("iam").get_role_policy(RoleName="autohet-worker", PolicyName="worker-policy")[
                "PolicyDocument"
            ]
        )
        assert "arn:aws:s3:::runs/*" in worker
        assert "${" not in worker
        assert "ec2:RunInstances" not in worker, "a spot node buys nothing"
        entry = {
            "Source": "aws.ec2",
            "DetailType": "EC2 Spot Instance Interruption Warning",
            "Detail": json.dumps(NOTICE),
        }
        client("events").put_events(Entries=[entry])
        source = QueueNotices(made["queue"])
        try:
            case = Case(source, say=lambda in_s: None, works=lambda: None)
            notice = case.wait(lambda departure, _: departure is not None)
        finally:
            source.close()
        assert notice is not None
        assert notice.deadline is not None
        assert 100 < notice.deadline - driver_now() <= 121
        unread = made["queue"] + "-unread"
        attributes = client("sqs").get_queue_attributes(QueueUrl=unread, AttributeNames=["All"])
        redrive = client("sqs").get_queue_attributes(
            QueueUrl=made["queue"], AttributeNames=["RedrivePolicy"]
        )["Attributes"]["RedrivePolicy"]
        target = json.loads(redrive)["deadLetterTargetArn"]
        assert target == attributes["Attributes"]["QueueArn"], "what nobody can read is kept"
        assert attributes["Attributes"]["MessageRetentionPeriod"] == "1209600"
        assert "Messages" not in client("sqs").receive_message(QueueUrl=made["queue"]), (
            "it is deleted"
        )


def test_prepare_versions_the_bucket_and_leaves_its_other_rules() -> None:
    publish_base_image("ami-now")
    theirs = {
        "ID": "theirs",
        "Status": "Enabled",
        "Filter": {"Prefix": "logs/"},
        "Expiration": {"Days": 90},
    }
    with s3_server() as server:
        s3 = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
        s3.create_bucket(Bucket="shared")
        s3.put_bucket_lifecycle_configuration(
            Bucket="shared", LifecycleConfiguration={"Rules": [theirs]}
        )
        for _ in range(2):
            script("prepare", "--bucket", "shared", **server.environment)
        assert s3.get_bucket_versioning(Bucket="shared")["Status"] == "Enabled"
        rules = s3.get_bucket_lifecycle_configuration(Bucket="shared")["Rules"]
        assert [rule["ID"] for rule in rules] == ["theirs", "autohet-old-versions"]
        assert rules[0]["Expiration"] == {"Days": 90}


def test_a_prefix_limits_every_statement_about_objects() -> None:
    path = str(ROOT / "scripts" / "aws" / "prepare")
    prepare = SourceFileLoader("prepare_script", path).load_module()
    values = {"BUCKET": "runs", "REGION": "us-east-1", "ACCOUNT": "123456789012"}
    for name in ("worker-policy.json", "driver-policy.json"):
        policy = json.loads(prepare.read_policy(name, values, ["gpt2", "", "/llama/"]))
        for statement in policy["Statement"]:
            if statement["Sid"] in ("Objects", "OwnReaderLeases", "Retention"):
                starts = ("arn:aws:s3:::runs/gpt2/", "arn:aws:s3:::runs/llama/")
                assert tuple(r[: len(s)] for r, s in zip(statement["Resource"], starts)) == starts
            if statement["Sid"] == "Listing":
                listed = {"StringLike": {"s3:prefix": ["gpt2/*", "llama/*"]}}
                assert statement["Condition"] == listed


def test_a_second_project_takes_nothing_from_the_first() -> None:
    """One role for the account and two buckets: a running job would lose its checkpoints."""
    publish_base_image("ami-now")
    with s3_server() as server:
        script("prepare", "--bucket", "first", **server.environment)
        iam = boto3.client("iam", endpoint_url=server.endpoint, region_name="us-east-1")

        def policies(role: str) -> str:
            names = iam.list_role_policies(RoleName=role)["PolicyNames"]
            found = [iam.get_role_policy(RoleName=role, PolicyName=name) for name in names]
            return json.dumps([each["PolicyDocument"] for each in found])

        before = policies("autohet-head")
        script("prepare", "--bucket", "third", **server.environment)
        both = policies("autohet-head")
        for bucket in ("first", "third"):
            assert f"arn:aws:s3:::{bucket}/*" in both, "its jobs run on"
        before = both
        made = script(
            *("prepare", "--bucket", "second", "--project", "llama", "--read-bucket", "data"),
            **server.environment,
        )
        assert policies("autohet-head") == before
        assert made["profiles"] == [
            "autohet-llama-worker",
            "autohet-llama-driver",
            "autohet-llama-head",
        ]
        assert made["queue"].endswith("/autohet-llama-notices")
        theirs = policies("autohet-llama-head")
        assert "arn:aws:s3:::second/*" in theirs
        assert "arn:aws:s3:::data/*" in theirs
        assert "arn:aws:s3:::first" not in theirs
        assert "role/autohet-llama-worker" in theirs
        assert ":autohet-llama-*" in theirs


def test_a_second_run_adds_a_region_and_a_prefix_and_takes_nothing() -> None:
    """Jobs of the first region and prefix run on under the same roles."""
    publish_base_image("ami-east")
    publish_base_image("ami-west", "us-west-2")
    arguments = ("prepare", "--bucket", "twice", "--project", "twice")
    with s3_server() as server:
        iam = boto3.client("iam", endpoint_url=server.endpoint, region_name="us-east-1")
        script(*arguments, "--prefix", "gpt2", **server.environment)
        trust = iam.get_role(RoleName="autohet-twice-worker")["Role"]["AssumeRolePolicyDocument"]
        own = {"Sid": "Mine", "Effect": "Allow", "Principal": {"AWS": "123456789012"}}
        trust["Statement"].append({**own, "Action": "sts:AssumeRole"})
        iam.update_assume_role_policy(
            RoleName="autohet-twice-worker", PolicyDocument=json.dumps(trust)
        )
        done = run_script(
            *(*arguments, "--prefix", "llama", "--region", "us-west-2"),
            **server.environment,
        )
        assert done.returncode == 0, done.stderr

        def resources(role: str, policy: str, sid: str) -> list[str]:
            found = iam.get_role_policy(RoleName=role, PolicyName=policy)["PolicyDocument"]
            (statement,) = [each for each in found["Statement"] if each["Sid"] == sid]
            if sid == "Listing":
                return sorted(statement["Condition"]["StringLike"]["s3:prefix"])
            return sorted(statement["Resource"])

        assert resources("autohet-twice-worker", "worker-policy", "Objects") == [
            "arn:aws:s3:::twice/gpt2/*",
            "arn:aws:s3:::twice/llama/*",
        ]
        assert resources("autohet-twice-worker", "worker-policy", "Listing") == [
            "gpt2/*",
            "llama/*",
        ]
        queues = resources("autohet-twice-driver", "driver-policy", "Notices")
        assert [queue.split(":")[3] for queue in queues] == ["us-east-1", "us-west-2"]
        trust = iam.get_role(RoleName="autohet-twice-worker")["Role"]["AssumeRolePolicyDocument"]
        assert "Mine" in [statement.get("Sid") for statement in trust["Statement"]]
        assert "arn:aws:s3:::twice/gpt2/*" in done.stderr, "what is kept is said"
        assert "bucket twice is in us-east-1, the nodes in us-west-2" in done.stderr


def test_a_bucket_of_ones_own_is_described_where_it_may_lose_or_cost_something() -> None:
    publish_base_image("ami-now")
    deny = {"Sid": "NoHttp", "Effect": "Deny", "Principal": "*", "Action": "s3:PutObject"}
    key = "arn:aws:kms:us-east-1:123456789012:key/1"
    with s3_server() as server:
        s3 = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
        s3.create_bucket(Bucket="owned")
        statement = {**deny, "Resource": "arn:aws:s3:::owned/*"}
        policy = {"Version": "2012-10-17", "Statement": [statement]}
        s3.put_bucket_policy(Bucket="owned", Policy=json.dumps(policy))
        encryption = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}
        s3.put_bucket_encryption(
            Bucket="owned",
            ServerSideEncryptionConfiguration={
                "Rules": [{"ApplyServerSideEncryptionByDefault": encryption}]
            },
        )
        rule = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": ""}}
        rules = [{**rule, "Expiration": {"Days": 7}}]
        s3.put_bucket_lifecycle_configuration(
            Bucket="owned", LifecycleConfiguration={"Rules": rules}
        )
        done = run_script("prepare", "--bucket", "owned", **server.environment)
    assert done.returncode == 0, done.stderr
    for word in (key, "denies s3:PutObject (NoHttp)", "rule old", "after 7 days"):
        assert word in done.stderr


@pytest.mark.parametrize("name", ["prepare", "check", "efa"])
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"AWS_PROFILE": "nobody"}, "nobody"),
        ({"AWS_PROFILE": "sso"}, "log in"),
        ({"AWS_CONFIG_FILE": "/nowhere"}, "no AWS credentials here"),
    ],
)
def test_an_identity_that_aws_does_not_have_ends_a_script_in_a_sentence(
    name: str,
    environment: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config").write_text(
        "[profile sso]\nregion = us-east-1\nsso_region = us-east-1\nsso_account_id = 1\n"
        "sso_role_name = r\nsso_start_url = https://example.awsapps.com/start\n"
    )
    file = tmp_path / "cluster.yaml"
    file.write_text(PUBLIC % SHIPPED)
    for key in [key for key in os.environ if key.startswith("AWS_")]:
        monkeypatch.delenv(key)
    clean = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": str(tmp_path / "config")}
    clean |= {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "HOME": str(tmp_path)}
    arguments = {
        "prepare": ["--bucket", "b"],
        "check": [str(file)],
        "efa": [str(file), "--subnet", "s"],
    }
    done = run_script(name, *arguments[name], **(clean | environment))
    assert done.returncode == 1
    assert words in done.stderr + done.stdout


def test_settings_that_boto3_does_not_understand_are_one_sentence() -> None:
    """As boto3 raises them for a credential_process that prints no JSON, a number that is none, and
    an MFA code that nobody types. Wrong: a traceback.
    """
    for code, words in (
        ("json.loads('hello')", "credential_process"),
        ("int('many')", "AWS settings here are not understood"),
        ("[][0:0] or exec('raise EOFError')", "run the script in a terminal"),
    ):
        errors = io.StringIO()
        with redirect_stderr(errors):
            assert aws_errors.run_script("s", lambda code=code: eval(code)) == 1
        assert words in errors.getvalue()
        assert len(errors.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bucket", "s3://unmade/gpt2"], "given by its name, here 'unmade'"),
        (["--bucket", "unmade", "--region", "us-gov-west-1"], "us-gov-west-1 is in aws-us-gov"),
    ],
)
def test_a_bucket_or_a_region_that_prepare_cannot_serve_is_refused_before_anything_is_made(
    arguments: list[str], words: str
) -> None:
    assert aws_errors.bucket_name("s3://unmade/") == "unmade"
    with s3_server() as server:
        done = run_script("prepare", *arguments, **server.environment)
        assert done.returncode == 1
        assert words in done.stderr
        client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
        assert "unmade" not in [each["Name"] for each in client.list_buckets()["Buckets"]]


def test_a_path_that_is_not_there_or_no_yaml_ends_a_script_in_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    for path in (broken, tmp_path / "none.yaml", tmp_path):
        for arguments in (
            ["check", str(path)],
            ["prepare", "--bucket", "b", "--pin", str(path)],
            ["efa", str(path), "--subnet", "s"],
        ):
            done = run_script(*arguments)
            assert done.returncode == 1
            assert len(done.stderr.splitlines()) == 1, done.stderr


PUBLIC = """# a file that nobody here wrote
cluster_name: mine
max_workers: 4
provider: {type: aws, region: us-west-2, availability_zone: "us-west-2a"}
head_node_type: h
available_node_types:
  h:
    node_config: {InstanceType: m5.large, ImageId: ami-0123456789abcdef0}
  w:
    node_config: {InstanceType: g5.xlarge, ImageId: %s}   # comment
"""


def test_a_file_that_pin_does_not_know_is_pinned_or_left_as_it_is(tmp_path: Path) -> None:
    publish_base_image("ami-west", "us-west-2")
    publish_base_image("ami-east", "us-east-1")
    file = tmp_path / "cluster.yaml"
    with s3_server() as server:
        arguments = ("--bucket", "pins", "--region", "us-west-2", "--pin", str(file))
        file.write_text(PUBLIC % SHIPPED)
        script("prepare", *arguments, **server.environment)
        assert file.read_text() == PUBLIC % "ami-west"
        theirs = PUBLIC % "ami-0fedcba9876543210"
        file.write_text(theirs)
        done = run_script("prepare", *arguments, **server.environment)
        assert done.returncode == 1
        assert "starts no node from the base image" in done.stderr
        assert file.read_text() == theirs


def test_the_region_is_the_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_base_image("ami-west", "us-west-2")
    (tmp_path / "config").write_text("[profile west]\nregion = us-west-2\n")
    with s3_server():
        environment = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_PROFILE": "west"}
        for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
            monkeypatch.delenv(name, raising=False)
        made = script("prepare", "--bucket", "west", **environment)
    assert made["image"] == "ami-west"


def test_prepare_pins_the_image_of_a_region(tmp_path: Path) -> None:
    """Nodes that come weeks later start from the same image; a file for another region has that
    one's image and zones.
    """
    for region, image in {"us-east-1": "ami-us", "eu-west-1": "ami-eu"}.items():
        publish_base_image(image, region)
    shipped = ROOT / "cluster_configs" / "aws-p5-p4d.yaml"
    file = tmp_path / "cluster.yaml"
    shutil.copy(shipped, file)
    with s3_server() as server:
        arguments = ("--bucket", "pinned", "--pin", str(file))
        script("prepare", *arguments, **server.environment)
        assert without_images(file, "ami-us") == without_images(shipped, SHIPPED)
        publish_base_image("ami-later")
        script("prepare", *arguments, "--region", "eu-west-1", **server.environment)
        expected = without_images(shipped, SHIPPED)
        expected["provider"] |= {
            "region": "eu-west-1",
            "availability_zone": "eu-west-1a,eu-west-1b,eu-west-1c",
        }
        assert without_images(file, "ami-eu") == expected


def test_prepare_makes_the_placement_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """moto knows no placement groups: botocore's own stub checks what EC2 is asked, and answers as
    it does.
    """
    publish_base_image("ami-now")
    real = boto3.client
    ec2 = boto3.client(
        "ec2", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    path = str(ROOT / "scripts" / "aws" / "prepare")
    prepare = SourceFileLoader("prepare_script", path).load_module()
    monkeypatch.setattr(
        boto3,
        "client",
        lambda service, **options: ec2 if service == "ec2" else real(service, **options),
    )
    monkeypatch.setattr(sys, "argv", [path, "--bucket", "grouped", "--placement-group"])
    asked = {"GroupName": "autohet", "Strategy": "cluster"}
    with s3_server(), Stubber(ec2) as stub:
        stub.add_response("create_placement_group", {}, asked)
        prepare.main()
        stub.add_client_error(
            "create_placement_group", "InvalidPlacementGroup.Duplicate", expected_params=asked
        )
        prepare.main()
        stub.assert_no_pending_responses()


def without_images(file: Path, image: str) -> dict[str, Any]:
    """The cluster file, after a look that this is the one image in it."""
    document = yaml.safe_load(file.read_text())
    images = {
        kind["node_config"].pop("ImageId") for kind in document["available_node_types"].values()
    }
    assert images == {image}
    return document


@pytest.mark.skipif(environment_missing() is not None, reason=str(environment_missing()))
def test_the_readmes_first_lines_work_in_a_fresh_shell(tmp_path: Path) -> None:
    """Nothing is activated and the home is new; what starts machines is in test_aws_launch.py."""
    commands = readme_commands()
    first = commands[
        : next(index for index, command in enumerate(commands) if command.startswith("ray up"))
    ]
    publish_base_image("ami-now")
    with s3_server() as server:
        environment = {**server.environment, "HOME": str(tmp_path), "PATH": SYSTEM}
        lines = "\n".join(
            [
                *first,
                "ray up --help > /dev/null",
                "autohet --version > /dev/null",
                "echo $RAY_AUTH_MODE",
            ]
        )
        done = subprocess.run(
            ["bash", "-ec", lines],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f'"bucket": "{BUCKET}"' in done.stdout
    assert done.stdout.endswith("token\n")
    assert (tmp_path / ".ray" / "auth_token").exists()


@pytest.mark.parametrize("name", ["prepare", "bake"])
def test_without_boto3_a_script_says_what_to_do(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(ROOT / "scripts" / "aws" / name)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == "boto3 is missing here; run `scripts/setup` and `. .venv/bin/activate` first\n"
    )


def test_bake_leaves_an_image_whose_id_a_parameter_version_pins() -> None:
    """moto's instances do not run: a thread stops the one that the installation would shut down."""
    publish_base_image("ami-now")
    with s3_server() as server:
        script("prepare", "--bucket", "runs", **server.environment)
        ec2 = boto3.client("ec2", endpoint_url=server.endpoint, region_name="us-east-1")
        ssm = boto3.client("ssm", endpoint_url=server.endpoint, region_name="us-east-1")

        def instances() -> list[dict[str, Any]]:
            return [
                i for page in ec2.describe_instances()["Reservations"] for i in page["Instances"]
            ]

        def shut_down() -> None:
            wait_until(lambda: bool(instances()), "the instance")
            ec2.stop_instances(InstanceIds=[instances()[0]["InstanceId"]])

        thread = threading.Thread(target=shut_down)
        thread.start()
        made = script("bake", "--source-uri", "s3://runs/autohet.tar.gz", **server.environment)
        thread.join(60)
        parameter = ssm.get_parameter(Name="/autohet/image")["Parameter"]
        assert parameter["Value"] == made["image"]
        assert made["ImageId"] == f"resolve:ssm:/autohet/image:{parameter['Version']}"
        assert [
            image["State"] for image in ec2.describe_images(ImageIds=[made["image"]])["Images"]
        ] == ["available"]
        assert [instance["State"]["Name"] for instance in instances()] == ["terminated"]
