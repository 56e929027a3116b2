"""Large numbers, for people."""

from __future__ import annotations

__all__: list[str] = []


def _format_size(x: int, sig_figs: int = 3, hide_zero: bool = False) -> str:
    """Return a number with its unit: K, M, G, T or P.

    Args:
        x: the number.
        sig_figs: digits that count.
        hide_zero: return "" for 0.

    Example:
        >>> _format_size(1_814_073_344), _format_size(11_689_512), _format_size(70)
        ('1.814G', '11.69M', '70')
    """
    if hide_zero and x == 0:
        return ""
    for power, unit in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "K")):
        if abs(x) > 10**power:
            value = x / 10**power
            return f"{value:.{max(sig_figs - len(str(int(abs(value)))) + 1, 0)}f}{unit}"
    return str(x)
