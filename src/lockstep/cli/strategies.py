"""`lockstep strategies`: which there are, what works here, and what does not and why."""

from __future__ import annotations


def strategies() -> None:
    """Show the strategies: their names, the packages they need, what works here, and what does not and why."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from lockstep.strategy.survey import survey_strategies  # imports torch, and the engines that are installed

    table = Table(title="strategy=..., or --strategy ...", title_justify="left", show_lines=True)
    table.add_column("name", style="bold")
    table.add_column("package")
    table.add_column("works here")
    table.add_column("refused here, and what to do instead", overflow="fold", ratio=1)
    for standing in survey_strategies():
        reasons = [f"{variant}: {reason}" if variant else reason for variant, reason in standing.refused.items()]
        table.add_row(
            standing.name,
            f"{standing.package} {standing.version or '-'}",
            "\n".join(standing.works) or "[bold red]no[/]",
            escape("\n".join(reasons)),
        )
    Console().print(table)
