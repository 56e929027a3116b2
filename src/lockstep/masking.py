"""Makes texts safe to save and to show: secrets become `***`, and control characters are escaped.

A secret is recognised by its name (`api_key`, `HF_TOKEN`), by its form (`hf_...`, `AKIA...`, the password in a URL,
the URL of a webhook), or, in a log, because the run's config has it under such a name. Tokens of a tokenizer are not
secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

MASK = "***"
_SHORTEST_IN_LOGS = 6  # a shorter secret could be a part of other words

# Control characters except line feeds and tabs; marks that reverse the order of letters; surrogates.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Last words of names that are secret, whatever words come before them.
_SECRET = {
    *("apikey", "authkey", "accesskey", "secretkey", "privatekey", "apitoken", "authtoken", "authorization", "jwt"),
    *(
        "bearer",
        "cookie",
        "cookies",
        "credential",
        "credentials",
        "passcode",
        "passphrase",
        "passwd",
        "password",
        "passwords",
        "secret",
        "secrets",
    ),
}
_PASSWORD_ENDS = ("pass", "passcode", "passwd", "password", "pwd")  # which may be numbers
# Endings of names that are written as one word: PGPASSWORD, mypassword, OPENAIAPIKEY.
_SECRET_ENDS = tuple(sorted(_SECRET - {"jwt"}))
# Words before `pass` that make it a password, unlike `forward_pass`.
_BEFORE_PASS = {
    *("account", "admin", "amqp", "api", "app", "auth", "client", "database", "db", "docker", "elastic", "email"),
    *("ftp", "git", "http", "https", "key", "keystore", "ldap", "login", "mail", "mongo", "mysql", "pg", "postgres"),
    *("proxy", "redis", "registry", "root", "server", "service", "smtp", "sql", "ssh", "sudo", "user"),
}
# Words before `key` and before `token` that make it secret: `sort_key` and `pad_token` are not.
_BEFORE_KEY = {
    *("access", "account", "api", "auth", "client", "deploy", "encryption", "license", "master", "private", "secret"),
    *("service", "shared", "signing", "ssh", "storage", "subscription", "webhook"),
}
_BEFORE_TOKEN = {
    *("access", "account", "api", "app", "auth", "aws", "bearer", "bot", "ci", "clearml", "client", "comet", "csrf"),
    *("deploy", "gcp", "git", "github", "gitlab", "hf", "hub", "huggingface", "job", "login", "mlflow", "neptune"),
    *("npm", "oauth", "personal", "private", "pypi", "refresh", "sas", "secret", "security", "service", "session"),
    *("slack", "telegram", "tracking", "upload", "user", "wandb", "webhook"),
}
_SPECIAL_TOKEN = re.compile(r"[<\[{|].*[>\]}|]")  # of a tokenizer
_NEVER_SECRET = {"", MASK, "None", "none", "null", "True", "true", "False", "false"}

# A text with none of these has no secret that `mask_text` recognises. Most lines of a log have none.
_HINTS = (
    *(
        "key",
        "token",
        "secret",
        "pass",
        "pw",
        "cookie",
        "credential",
        "auth",
        "jwt",
        "://",
        "bearer",
        "basic",
        "wandb",
        "sig",
    ),
    *("hf_", "akia", "asia", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat", "glpat-", "sk-", "xox", "aiza"),
    *("nvapi-", "eyj"),
)

_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{22,}|\bglpat-[\w-]{20,}"
    r"|\bsk-[\w-]{20,}|\bxox[abeprs]-[\w-]{10,}|\bAIza[\w-]{35}|\bnvapi-[\w-]{20,}|\bwandb_v\d_\w{20,}"
    r"|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_IN_URL = re.compile(r"((?<![\w+.-])[A-Za-z0-9+.-]++://[^\s/'\"@:]*):([^\s/'\"]+)@")
# A URL with a key in place of user and password; `git@` and `oauth2@` are names of users.
_KEY_IN_URL = re.compile(r"\b((?:[a-z]+\+)?(?:https?|wss?)://)(?!git@|oauth2@|\*\*\*@)[^\s/?#'\"@:]+@", re.IGNORECASE)
_SIGNED_URL = re.compile(r"([?&](?:sig|signature)=)[^\s&#'\"]+", re.IGNORECASE)
# URLs that let whoever knows them post: of Slack, Discord and Teams. What follows the host is the secret.
_WEBHOOK = re.compile(
    r"\b(https://(?:hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)"
    r"|(?:\w+\.)?discord(?:app)?\.com/api(?:/v\d+)?/webhooks"
    r"|(?:[\w-]+\.webhook|outlook)\.office(?:365)?\.com/webhook\w*)/)[^\s'\"<>),;]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}")
_WANDB = re.compile(r"(wandb[^\n]{0,40}?)\b[0-9a-f]{40}\b", re.IGNORECASE)
_QUOTE = r"(?i:[bruf]{0,2})(?:'''|\"\"\"|['\"])"  # that opens a string of Python
_QUOTED = (
    r"(?i:[bruf]{0,2})(?:'''(?s:[^\\]|\\.)*?'''|\"\"\"(?s:[^\\]|\\.)*?\"\"\""
    r"|'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")"
)
# name=value, `name: str = value`, 'name': 'value', also as JSON in a string, and `name: value` if the line ends with
# the value: a colon alone is also what sentences have. Each run of letters is looked at once, so that the time does not
# grow with its square.
_NAMED = re.compile(
    r"(?<![\w.-])[\d.-]*+(?P<name>[A-Za-z_][\w.-]*+)(?:\\*['\"])?\]?"
    r"(?::[ \t]*[\w.]+(?:\[[\w., \[\]|]{0,40}\])?(?:[ \t]*\|[ \t]*None)?[ \t]*(?==))?"
    rf"(?:\s*=\s*|\s*:\s*(?=\\*{_QUOTE}|[\[({{]\s*{_QUOTE})|:[ \t]+(?=[^\s'\"#]+[ \t]*$))",
    re.MULTILINE,
)
_VALUE = re.compile(rf"{_QUOTED}|\\+['\"][^'\"\\\n]*\\+['\"]|[^\s'\",;&)\]}}]+")
_SEVERAL = re.compile(rf"[\[({{\s]+{_QUOTED}(?:\s*[,:]\s*{_QUOTED})*")  # ['a', 'b'], ("a"), {{"name": "a"}}
_OPTION = re.compile(
    rf"(?P<left>(?<![\w-])--?(?P<name>[A-Za-z][\w.-]*+)\s+)(?P<value>{_QUOTED}|[^\s'\"-][^\s'\"]*)"
)  # --name value
_TYPES = {"Any", "None", "Path", "SecretStr", "bool", "bytes", "float", "int", "object", "str"}  # of annotations


def is_secret_name(name: str) -> bool:
    """Return whether a value of this name is a secret: of a config's key, an option or a variable.

    Example:
        >>> [is_secret_name(name) for name in ("visualizer.api_key", "HF_TOKEN", "pad_token", "num_tokens")]
        [True, True, False, False]
    """
    *above, last = name.split(".")
    if last != "type" and any(_holds_secrets(key) for key in above):
        return True
    words = _words(last)
    if words[-2:] == ["key", "id"]:  # of AWS
        words.pop()
    before, last = ["", *words][-2:] if words else ("", "")
    if last == "pass":
        return before in _BEFORE_PASS
    if last == "signature":
        return before in ("amz", "goog")  # of URLs that are signed
    if last in ("token", "tokens"):
        return words == ["token"] or before in _BEFORE_TOKEN
    if last in ("pwd", "pw"):
        return not name.rpartition(".")[2].startswith("PWD")  # the current folder
    return last.endswith(_SECRET_ENDS) or last == "jwt" or (last in ("key", "keys") and before in _BEFORE_KEY)


def _words(name: str) -> list[str]:
    """Return the words of a name without a number at its end: `HF_TOKEN_2` is another `HF_TOKEN`."""
    return [word.lower() for word in _WORDS.findall(name.rstrip("0123456789_-"))]


def _holds_secrets(name: str) -> bool:
    """Return whether all strings below a key are secret, as below `credentials`; a part of a model may be a `token`."""
    return _words(name)[-1:] in ([word] for word in _SECRET)


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without the secrets that can be recognised in it, and without the given ones.

    Example:
        >>> mask_text("s3://me:pass@host/x --api-key=abc num_tokens=7")
        's3://me:***@host/x --api-key=*** num_tokens=7'
    """
    for secret in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another one
        text = text.replace(secret, MASK)
    lowered = text.lower()
    if not any(hint in lowered for hint in _HINTS):
        return text
    text = _IN_URL.sub(rf"\1:{MASK}@", text)
    text = _KEY_IN_URL.sub(rf"\1{MASK}@", text)
    text = _SIGNED_URL.sub(rf"\1{MASK}", text)
    text = _WEBHOOK.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _WANDB.sub(rf"\1{MASK}", text)
    text = _FORMS.sub(MASK, text)  # before names, whose values end at a space: a private key has some
    return _OPTION.sub(lambda it: it["left"] + _masked(it["name"], it["value"]), _mask_assignments(text))


def printable(text: str, *, lines: bool = True) -> str:
    r"""Return a text that a terminal shows as it is: characters that would move its cursor, colour or hide are escaped.

    Args:
        text: a text that may come from a stranger.
        lines: keep line breaks; False escapes them, too, so that a value cannot look like further lines.

    Example:
        >>> print(printable("epoch\x1b[2J 1\nok\r"))
        epoch\x1b[2J 1
        ok\r
        >>> print(printable("1\nall is well", lines=False))
        1\nall is well
    """
    text = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text if lines else text.replace("\n", r"\n")


def mask_value(value: Any, name: str = "") -> Any:
    """Return a copy of a config's value, in which secrets are masked; dicts, lists and tuples are copied.

    Args:
        value: the value.
        name: its key.

    Example:
        >>> mask_value({"lr": 0.1, "login": {"api_key": "abc", "user": "me"}})
        {'lr': 0.1, 'login': {'api_key': '***', 'user': 'me'}}
    """
    return _mask(value, name, set())


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, without secrets.

    Example:
        >>> mask_words(["train", "visualizer.api_key=abc", "--token", "abc", "tokens=8"])
        ['train', 'visualizer.api_key=***', '--token', '***', 'tokens=8']
    """
    masked = []
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if before.startswith("-") and "=" not in before and not word.startswith("-") and is_secret_name(before):
            masked.append(mask_value(word, before))
        elif equals and re.fullmatch(r"[\w.-]+", name):
            masked.append(f"{name}={mask_value(value, name)}")
        else:
            masked.append(mask_text(word))
        before = word
    return masked


def secrets_in(value: Any) -> set[str]:
    """Return the strings that `mask_value` would mask as a whole, if they are long enough to be looked for in a log."""
    found: set[str] = set()
    _mask(value, "", found)
    return {secret for secret in found if len(secret) >= _SHORTEST_IN_LOGS}


def is_masked(value: Any) -> bool:
    """Return whether a value is a string from which a secret was removed."""
    return isinstance(value, str) and (value == MASK or f"{MASK}@" in value or _is_masked_webhook(value))


def _is_masked_webhook(value: str) -> bool:
    return value.endswith(f"/{MASK}") and _WEBHOOK.fullmatch(value) is not None


def _mask(value: Any, name: str, found: set[str]) -> Any:
    """Return a masked copy of a value, and add the strings that are secret as a whole to `found`."""
    if isinstance(value, Mapping):
        return {key: _mask(item, f"{name}.{key}" if name else str(key), found) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return type(value)(_mask(item, name, found) for item in value)
    if isinstance(value, list | tuple):
        names = [name, *(_name_after(item, name) for item in value)]
        if _words(name)[-1:] == ["auth"] and len(value) == 2:  # user and password, as requests takes them
            names[1] = f"{name}.password"
        items = [_mask(item, own, found) for item, own in zip(value, names, strict=False)]
        return items if isinstance(value, list) else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, str) and not isinstance(value, Enum):
        if not _is_secret(value, name):
            return mask_text(value)
        found.add(value)
        return MASK
    return MASK if _is_secret_number_or_bytes(value, name) else value


def _name_after(word: Any, name: str) -> str:
    """Return the name of what follows a word in a list: an option of a command line names the next word."""
    is_option = isinstance(word, str) and word.startswith("-") and "=" not in word
    return word if is_option and is_secret_name(word) else name


def _is_plain(value: str, name: str) -> bool:
    """Return whether a value is no secret whatever its name: nothing, a token of a tokenizer, a folder as `pwd`."""
    is_folder = _words(name)[-1:] == ["pwd"] and value.startswith(("/", "~", "./", "../"))
    return is_folder or value in _NEVER_SECRET or _SPECIAL_TOKEN.fullmatch(value) is not None


def _is_secret(value: str, name: str) -> bool:
    if _is_plain(value, name):
        return False
    return is_secret_name(name) or (_words(name)[-1:] in (["key"], ["token"]) and _looks_random(value))


def _is_secret_number_or_bytes(value: object, name: str) -> bool:
    """Return whether a value that is not a string is a secret."""
    if not is_secret_name(name) or isinstance(value, bool):
        return False
    return isinstance(value, bytes) or (isinstance(value, int | float) and _is_password(name))


def _looks_random(text: str) -> bool:
    """Return whether a text looks as if a machine had drawn it: a hash, or letters of both cases and digits."""
    if re.fullmatch(r"[0-9a-f]{32,}", text):
        return True
    kinds = ("[a-z]", "[A-Z]", "[0-9]")
    return re.fullmatch(r"[A-Za-z0-9+/=_-]{20,}", text) is not None and all(re.search(kind, text) for kind in kinds)


def _mask_assignments(text: str) -> str:
    """Mask the values of secret names in assignments, also nested ones: `login=dict(api_key=...)`."""
    parts, done, start = [], 0, 0
    while (named := _NAMED.search(text, start)) is not None:
        start = named.end()
        name: str = named["name"]
        if not is_secret_name(name):
            start = named.end("name")  # what follows may be a name itself, as in `error: token=...`
        elif (several := _SEVERAL.match(text, start)) is not None:
            parts += [text[done:start], re.sub(_QUOTED, partial(_masked_string, name), several[0])]
            done = start = several.end()
        elif (value := _VALUE.match(text, start)) is not None:
            parts += [text[done:start], _masked(name, value[0])]
            done = start = value.end()
    return "".join([*parts, text[done:]])


def _masked_string(name: str, value: re.Match[str]) -> str:
    return _masked(name, value[0])


def _masked(name: str, value: str) -> str:
    """Return what to show of a value, quoted or not, that has a name."""
    opening = "".join(re.findall(rf"\A{_QUOTE}", value))
    quote = opening.lstrip("bBrRuUfF")
    plain = value[len(opening) : len(value) - len(quote)]
    is_plain = _is_plain(plain, name) or (not quote and _is_code(plain, name))
    return value if is_plain or not is_secret_name(name) else f"{opening}{MASK}{quote}"


def _is_code(value: str, name: str) -> bool:
    """Return whether a value without quotes is a number or the beginning of an expression, not a secret."""
    if value in _TYPES:
        return True
    if re.fullmatch(r"[\d.+-]+", value):
        return not _is_password(name)
    return value[0] in "([{<" or re.match(r"[A-Za-z_][\w.]*\(", value) is not None


def _is_password(name: str) -> bool:
    return "".join(_words(name)[-1:]).endswith(_PASSWORD_ENDS)
