from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from lockstep.masking import MASK, is_secret_name, mask_text, mask_value, mask_words, printable, secrets_in

SECRET = [
    *("api_key", "apikey", "apiKey", "API_KEY", "OPENAI_API_KEY", "visualizer.api_key", "WANDB_API_KEY", "api-key"),
    *("token", "TOKEN", "hf_token", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "api_token", "auth_token", "accessToken"),
    *("use_auth_token", "NEPTUNE_API_TOKEN", "api_tokens", "AWS_SESSION_TOKEN", "GITHUB_TOKEN", "csrf-token"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "aws_secret_access_key", "secret_key", "private_key", "ssh_key"),
    *("password", "PASSWORD", "db_password", "passwd", "db_pwd", "passphrase", "MLFLOW_TRACKING_PASSWORD"),
    *("pwd", "model.pwd", "pw", "cookie", "bearer"),
    *("secret", "client_secret", "clientSecret", "secrets", "credentials", "credentials.user", "aws_credentials.x.y"),
    *("Authorization", "SLURM_JWT", "AZURE_STORAGE_KEY", "account_key", "DB_PASS", "SMTP_PASS", "user_pass"),
    *("PGPASSWORD", "PGPASSFILE_PASSWORD", "mypassword", "OPENAIAPIKEY", "X-Amz-Signature", "X-Amz-Security-Token"),
    *("OPENAI_API_KEY_2", "password1", "HF_TOKEN2", "db_pass_1", "AWS_ACCESS_KEY_ID_2", "apiKey-10"),
]  # fmt: skip
NO_SECRET = [
    *("tokens_of", "num_tokens", "tokenizer", "tokenizer.name", "pad_token_id", "token_type_ids", "pad_token"),
    *("bos_token", "eos_token", "unk_token", "mask_token", "cls_token", "sep_token", "image_token", "tokens"),
    *("additional_special_tokens", "max_new_tokens", "tokens_per_second", "token_dropout", "token_embedding"),
    *("use_cls_token", "num_image_tokens", "token.type", "key", "keys", "key_padding_mask", "sort_key", "monitor_key"),
    *("num_heads_key", "primary_key", "keyframe", "secretary", "credential_file", "password_file", "secret_dim"),
    *("passing", "PWD", "OLDPWD", "author", "auth", "api_url", "access_mode", "keep", "passes"),
    *(
        "pass_through",
        "forward_pass",
        "num_passes",
        "high_pass",
        "signature",
        "input_signature",
        "token_count",
        "signal",
    ),
    *("lr", "weight_decay", "key_value_heads", "num_key_value_heads", "token_ids", "tokenize", "api_key_name", ""),
    *(
        "max_tokens2",
        "num_tokens_1",
        "tokens_2",
        "pad_token_1",
        "key_1",
        "sort_key2",
        "forward_pass_2",
        "PWD2",
        "secret_2d",
    ),
]


@pytest.mark.parametrize("name", SECRET)
def test_a_secret_name(name):
    assert is_secret_name(name)
    assert mask_value("x", name) == MASK


@pytest.mark.parametrize("name", NO_SECRET)
def test_no_secret_name(name):
    assert not is_secret_name(name)
    value = {"a": "<pad>", "b": [1, "hello world"], "type": "Embedding"}
    assert mask_value(value, name) == value
    assert mask_value(7, name) == 7
    assert mask_text(f"{name}='<pad>' {name}=12 {name}: hello") == f"{name}='<pad>' {name}=12 {name}: hello"


HF = "hf_" + "aB3" * 11 + "x"
HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("s3://me:pa:ss@bucket/a@b", "s3://me:***@bucket/a@b"),
        ("s3://me:p@ss@bucket/x", "s3://me:***@bucket/x"),
        ("mysql://root:hunter2@db:3306/runs and more", "mysql://root:***@db:3306/runs and more"),
        ("redis://:hunter2@db/0", "redis://:***@db/0"),
        ("ssh://git@host/x s3://bucket/a@b", "ssh://git@host/x s3://bucket/a@b"),
        ("http://[::1]:29500/x tcp://localhost:29500", "http://[::1]:29500/x tcp://localhost:29500"),
        (f"login {HF}.", "login ***."),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("ghp_" + "a1" * 18, "***"),
        ("glpat-" + "a1" * 10, "***"),
        ("sk-proj-" + "a1" * 20, "***"),
        ("xoxb-123456789012-abcdef", "***"),
        ("AIza" + "b" * 35, "***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sflKxwRJSMeKKF2QT4", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
        (
            "SSH_PRIVATE_KEY=-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----\nx",
            "SSH_PRIVATE_KEY=***\nx",
        ),
        ("--private-key '-----BEGIN PRIVATE KEY-----\nMIIEabc", "--private-key '***"),
        ("k: -----BEGIN PGP PRIVATE KEY BLOCK-----\na\n-----END PGP PRIVATE KEY BLOCK-----\nx", "k: ***\nx"),
        (f"wandb login {HEX}", "wandb login ***"),
        (f"wandb_key {HEX}", "wandb_key ***"),
        (f"commit {HEX}", f"commit {HEX}"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer ***"),
        ("dict(api_key='abc', lr=0.1)", "dict(api_key='***', lr=0.1)"),
        ("{'api_key': 'abc', \"token\": \"x\"}", "{'api_key': '***', \"token\": \"***\"}"),
        ("password='it\\'s' x", "password='***' x"),
        ("password=b'hunter2' x", "password=b'***' x"),
        ("{'password': b'hunter2', \"token\" : Rb\"x\"}", "{'password': b'***', \"token\" : Rb\"***\"}"),
        ("--password b'hunter2' --secret r'a'", "--password b'***' --secret r'***'"),
        ("api_key='''secret\n'abc''' x", "api_key='''***''' x"),
        ('password: """a"b\\"""" api_key="" token=\'\' x', 'password: """***""" api_key="" token=\'\' x'),
        ("password=before password=f'{word}'", "password=*** password=f'{word}'"),
        ("--api-key abc --lr 3", "--api-key *** --lr 3"),
        ("--api-key=abc --num-tokens=3", "--api-key=*** --num-tokens=3"),
        ("--cfg-options visualizer.api_key=abc", "--cfg-options visualizer.api_key=***"),
        ("--env=HF_TOKEN=abc", "--env=HF_TOKEN=***"),
        ("https://x/y?user=me&token=abc&z=1", "https://x/y?user=me&token=***&z=1"),
        ("AccountKey=abc==;x", "AccountKey=***;x"),
        ("password=12345", "password=***"),
        ("init_kwargs=dict(api_key='abc', mode='online')", "init_kwargs=dict(api_key='***', mode='online')"),
        ('f(g=h(x=[dict(token="abc")]))', 'f(g=h(x=[dict(token="***")]))'),
        ("init=partial(login, password=sesame, n=3)", "init=partial(login, password=***, n=3)"),
        ("a: 1\npassword: sesame\nb: 2", "a: 1\npassword: ***\nb: 2"),
        ("  - api_key: abc123  ", "  - api_key: ***  "),
        ("the server says: wrong token: abc123", "the server says: wrong token: ***"),
        ("DB_PASS=sesame PGPASSWORD=12345 psql", "DB_PASS=*** PGPASSWORD=*** psql"),
        ("https://0a1b2c3d@o1.ingest.example/7 x", "https://***@o1.ingest.example/7 x"),
        ("git+https://abcdef@host/repo.git", "git+https://***@host/repo.git"),
        (
            "https://host/a@b https://host?x=a@b https://git@host/x",
            "https://host/a@b https://host?x=a@b https://git@host/x",
        ),
        ("https://b/x?X-Amz-Date=1&X-Amz-Signature=abc&y=2", "https://b/x?X-Amz-Date=1&X-Amz-Signature=***&y=2"),
        ("https://b/x?sv=1&sig=a%2Fb%3D&y=2", "https://b/x?sv=1&sig=***&y=2"),
        ("https://hooks.slack.com/services/T000/B000/XXXX x", "https://hooks.slack.com/services/*** x"),
        ("('https://hooks.slack.com/triggers/E1/2/ab')", "('https://hooks.slack.com/triggers/***')"),
        ("see https://discord.com/api/webhooks/12/a-b_c, x", "see https://discord.com/api/webhooks/***, x"),
        ("https://ptb.discordapp.com/api/v10/webhooks/12/ab", "https://ptb.discordapp.com/api/v10/webhooks/***"),
        ("https://me.webhook.office.com/webhookb2/a@b/In/c/d", "https://me.webhook.office.com/webhookb2/***"),
        ("https://outlook.office.com/webhook/a@b/In/c/d", "https://outlook.office.com/webhook/***"),
        (
            "https://prod-1.westus.logic.azure.com:443/workflows/a/invoke?sv=1.0&sig=a-b_c",
            "https://prod-1.westus.logic.azure.com:443/workflows/a/invoke?sv=1.0&sig=***",
        ),
        ("https://slack.com/help https://discord.com/a", "https://slack.com/help https://discord.com/a"),
        ("pass_through=1 token_count: 12", "pass_through=1 token_count: 12"),
        ("token_count: 12\ntokenizer=gpt2\ntokenizer: gpt2", "token_count: 12\ntokenizer=gpt2\ntokenizer: gpt2"),
        ("forward_pass=2 signature=f(x) sig=4 monkey=ape", "forward_pass=2 signature=f(x) sig=4 monkey=ape"),
        ("    token: str\n    password: str | None = None", "    token: str\n    password: str | None = None"),
        ("token: 12\npad_token: <pad>\npassword: 12", "token: 12\npad_token: <pad>\npassword: ***"),
        ("password1=12 HF_TOKEN2=abc max_tokens2=abc", "password1=*** HF_TOKEN2=*** max_tokens2=abc"),
        ("token=12 token=None api_key=True", "token=12 token=None api_key=True"),
        ("password = getpass(prompt)", "password = getpass(prompt)"),
        ("the token: where it is", "the token: where it is"),
        ("passwords=['hunter22', \"b\"] x=1", "passwords=['***', \"***\"] x=1"),
        ('api_key = ("abc" )', 'api_key = ("***" )'),
        ("api_keys={'mine': 'abc'}, lr=2", "api_keys={'***': '***'}, lr=2"),
        ('api_key: str = "abc"', 'api_key: str = "***"'),
        ("api_key: str | None = 'abc'; lr: float = 0.1", "api_key: str | None = '***'; lr: float = 0.1"),
        (
            "tokens: list[str] = ['a']; hf_token: dict[str, str] = {'a': 'b'}",
            "tokens: list[str] = ['a']; hf_token: dict[str, str] = {'***': '***'}",
        ),
        (r"{\"api_key\": \"abc\", \"lr\": 1}", r"{\"api_key\": ***, \"lr\": 1}"),
        ("error: token=abc def", "error: token=*** def"),
        ("`password` must be a str", "`password` must be a str"),
    ],
)
def test_a_text(text, masked):
    assert mask_text(text) == masked
    assert mask_text(masked) == masked


def test_values_in_any_nesting():
    Pair = namedtuple("Pair", "a b")
    value = {
        "visualizer": [{"type": "Wandb", "init_kwargs": {"api_key": "abc", "mode": "online"}}],
        "load_from": "s3://me:pass@bucket/x",
        "credentials": {"type": "basic", "user": "me", "levels": ["a", ("b",)]},
        "password": 123456,
        "secret": b"abc",
        "token": {"type": "Embedding", "width": 3},
        "api_keys": ["a", None, True],
        "tokens": {1, 2},
        "hf_token": {"a"},
        "use_auth_token": True,
        "pair": Pair("x", HF),
        "private_key": Path("key.pem"),
        "key": HEX,
        "company_token": "aZ09" * 6,
        3: str,
    }
    before = repr(value)
    assert mask_value(value) == {
        "visualizer": [{"type": "Wandb", "init_kwargs": {"api_key": MASK, "mode": "online"}}],
        "load_from": "s3://me:***@bucket/x",
        "credentials": {"type": "basic", "user": MASK, "levels": [MASK, (MASK,)]},
        "password": MASK,
        "secret": MASK,
        "token": {"type": "Embedding", "width": 3},
        "api_keys": [MASK, None, True],
        "tokens": {1, 2},
        "hf_token": {MASK},
        "use_auth_token": True,
        "pair": Pair("x", MASK),
        "private_key": Path("key.pem"),
        "key": MASK,
        "company_token": MASK,
        3: str,
    }
    assert repr(value) == before


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ({"pwd": "/work/x", "cmd": {"pwd": "~/x"}}, {"pwd": "/work/x", "cmd": {"pwd": "~/x"}}),  # a folder
        ({"auth": ("me", "x"), "auth_mode": ["a", "b"]}, {"auth": ("me", MASK), "auth_mode": ["a", "b"]}),
        ({"command": ["run", "--password", "x", "--lr", "3"]}, {"command": ["run", "--password", MASK, "--lr", "3"]}),
        ({"network": {"pw": 5}}, {"network": {"pw": 5}}),
    ],
)
def test_what_stands_beside_a_name_tells_whether_it_is_a_secret(value, masked):
    assert mask_value(value) == masked


def test_what_is_looked_for_in_logs():
    found = secrets_in({"api_key": "abcdef-1", "password": "pw", "x": {"token": "ghijkl-2"}, "name": "mnopqr-3"})
    assert found == {"abcdef-1", "ghijkl-2"}  # a shorter one may be a part of any word
    assert mask_text("sent abcdef-1 and mnopqr-3", found) == "sent *** and mnopqr-3"


def test_of_a_secret_that_begins_like_another_nothing_is_left():
    for secrets in (["hunter2", "hunter2-hunter"], ["hunter2-hunter", "hunter2"]):
        assert mask_text("sent hunter2-hunter and hunter2", secrets) == "sent *** and ***"


def test_words_of_a_command_line():
    words = ["train", "c.py", "--token", "abc", "visualizer.init.api_key=a b", "model.pad_token=<pad>", "--seed", "3"]
    words += ["load_from=s3://me:pw@host/x", "--password=x", "visualizer={'api_key':'x'}", "--use-token", "--resume"]
    words += ["HF_TOKEN_2=abc", "--password1", "abc", "num_tokens_1=abc"]
    assert mask_words(words) == [
        *("train", "c.py", "--token", "***", "visualizer.init.api_key=***", "model.pad_token=<pad>", "--seed", "3"),
        *("load_from=s3://me:***@host/x", "--password=***", "visualizer={'api_key':'***'}", "--use-token", "--resume"),
        *("HF_TOKEN_2=***", "--password1", "***", "num_tokens_1=abc"),
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, \u00fc, \u65e5\u672c", "plain, \u00fc, \u65e5\u672c"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\x9b31mb\x7f", r"a\x9b31mb\x7f"),
        ("seven\rnine\x08", r"seven\rnine\x08"),
        ("\u202eevil", r"\u202eevil"),
        ("half \ud800", r"half \ud800"),
        ("two\nlines", "two\nlines"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str):
    assert printable(text) == shown


def test_a_value_cannot_look_like_further_lines():
    assert printable("1\nall is well", lines=False) == r"1\nall is well"


@pytest.mark.parametrize("part", ["key", "a=", "key-", "x: ", "key ://", "key'", "x: a[", "x: a|", "\\", "x=['a',"])
def test_a_long_text_takes_a_time_that_does_not_grow_with_its_square(part):
    text = part * 10**5 + "key"
    assert mask_text(text) == text
