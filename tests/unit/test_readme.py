"""The README's example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_example_trains_policy_and_draft() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    parameters = dict(names["policy"].named_parameters())
    assert any(name.startswith("draft.") for name in parameters)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters.values())
