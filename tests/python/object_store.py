"""An S3 server with the bucket `models`. Prints its address and keys as JSON and serves until it is killed.

With `--credentials` it refuses every request that is not signed with the keys.
"""

import json
import os
import signal
import sys

BUCKET = "models"

# Requests before credentials are needed: those of `set_up`.
SET_UP = 4
if "--credentials" in sys.argv:
    os.environ["INITIAL_NO_AUTH_ACTION_COUNT"] = str(SET_UP)

import boto3  # noqa: E402  (moto reads its environment when it is imported)
from moto.server import ThreadedMotoServer  # noqa: E402


def set_up(endpoint):
    def client(service):
        return boto3.client(
            service,
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="setup",
            aws_secret_access_key="setup",
        )

    allowed = [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]
    policy = json.dumps({"Version": "2012-10-17", "Statement": allowed})
    client("s3").create_bucket(Bucket=BUCKET)
    users = client("iam")
    users.create_user(UserName="shoal")
    key = users.create_access_key(UserName="shoal")["AccessKey"]
    users.put_user_policy(UserName="shoal", PolicyName="all", PolicyDocument=policy)
    return key["AccessKeyId"], key["SecretAccessKey"]


def main():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    key, secret = set_up(f"http://{host}:{port}")
    print(
        json.dumps({"event": "listening", "address": f"{host}:{port}", "key": key, "secret": secret}),
        flush=True,
    )
    signal.pause()


main()
