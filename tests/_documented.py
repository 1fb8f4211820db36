"""What docs/json.md says of the JSON of a command, against what it prints; and the width of texts."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/json.md"


def documented_keys(command):
    """Return the keys that a command's list names; `*` is a name that varies, `[]` an entry, `{a,b}` either."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n## {command}\n")
    keys = set()
    for named in re.findall(r"^- ((?:`\S+`(?:,\s+)?)+)(?::|$)", section.partition("\n## ")[0], re.MULTILINE):
        for key in re.findall(r"`(\S+?)`", named):
            start, _, ends = key.rstrip("}").partition("{")
            keys |= {start + end for end in ends.split(",")}
    return keys


def printed_keys(value, documented, path=""):
    """Yield the keys of JSON in the page's form, each with whether nothing stands there."""
    below = {key for key in documented if key.startswith((f"{path}.", f"{path}[]."))} if path else documented
    if isinstance(value, dict) and value and below:
        varies = f"{path}.*" if path else "*"
        is_wild = any(key == varies or key.startswith(f"{varies}.") for key in documented)
        for name, inner in value.items():
            step = "*" if is_wild else name
            yield from printed_keys(inner, documented, f"{path}.{step}" if path else step)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from printed_keys(inner, documented, f"{path}[]")
    else:
        yield path, value in (None, [], {})


def assert_documented(command, printed):
    """Assert that a command printed the keys that the page lists, and no others."""
    documented = documented_keys(command)
    assert documented, command
    found = dict(sorted(printed_keys(printed, documented)))
    groups = {key for key in documented if any(other.startswith((f"{key}.", f"{key}[].")) for other in documented)}
    empty = {key for key, is_empty in found.items() if is_empty}
    unknown = {
        key
        for key in found.keys() - documented
        if not (key in empty and any(other.startswith((f"{key}.", f"{key}[].")) for other in documented))
    }
    absent = {
        key for key in documented - found.keys() - groups if not any(key.startswith((f"{e}.", f"{e}[]")) for e in empty)
    }
    assert (unknown, absent) == (set(), set()), command


def assert_narrow(text):
    """Assert that no line is longer than 80 columns, and that none is coloured."""
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "\x1b" not in text
