"""README.md's part of a bench: a narrow table of the ladder, what it was measured on, and the chart."""

from data import refuse

from . import ladder
from .markdown import NOTHING, gigabytes, link, short, table
from .page import chart
from .results import PLAIN

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"  # the part stands between these two lines


def readme_cells(results, name, above):
    """Return {column: cell} of a row in README.md's table. above: the row that it is compared with."""
    stage = ladder.find(name)
    summary = results.summary(name)
    row = {"stage": link(name, "stages/", short(name))}
    row["what you type"] = stage.line if stage else results.rows[name]["change"]
    row["tok/sec"] = f"{summary['tok_per_sec']:,.0f}" if summary else NOTHING
    for column, base in (("x above", above), (f"x {short(results.first_row)}", results.first_row)):
        compared = results.compare(name, base)
        row[column] = f"{compared[0]:.2f}" if compared else NOTHING
    row["memory GB"] = gigabytes(summary["memory"]) if summary else NOTHING
    return row


def readme_table(results):
    """Return README.md's table. The stages for the loss share a row, with the figures of the last one."""
    rows = []
    above = results.first_row
    for names in readme_groups(results):
        row = readme_cells(results, names[-1], above)
        if len(names) > 1:
            row["stage"] = ", ".join(link(name, "stages/", short(name)) for name in names)
            row["what you type"] = "for the loss: " + ", ".join(ladder.find(name).line for name in names)
        rows.append(row)
        above = names[-1]
    return table(rows)


def readme_groups(results):
    """Return the rows of README.md's table: a list of names for each, one, or several neighbors for the loss."""
    groups = []
    for name in results.rows:
        if name == PLAIN:
            continue
        stage = ladder.find(name)
        above = ladder.find(groups[-1][-1]) if groups else None
        if stage and above and stage.for_the_loss and above.for_the_loss:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def readme_part(results, name):
    """Return README.md's part between its markers: the table, what it was measured on, and the chart."""
    if results.mode != "ladder":
        refuse(f"README.md shows the ladder, and {name} is of {results.mode}: leave --readme out")
    facts = results.any_facts()
    if facts is None or not readme_groups(results):
        refuse(f"{name} has no step of a stage yet: leave --readme out")
    env, settings = facts["environment"], facts["settings"]
    shape = f"{settings['size']}, B {settings['batch_size']}, T {settings['seq_len']}"
    where = f"{env['device_name']}, torch {env['torch']}, {shape}, {facts['started'][:10]}"
    caption = f"{where}. [All columns, the noise and the predictions](results/{name}.md)."
    return "\n\n".join([readme_table(results), caption, chart(results)])


def with_part(readme, part):
    """Return README.md's text with a part between its two markers. Exits with one line where these are not there."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        refuse(f"README.md must hold {BEGIN} and, below it, {END}: put each there once")
    return f"{before}{BEGIN}\n{part.strip()}\n{END}{after}"
