"""Output of `metaloom du`."""

from rich.console import Group, RenderableType

from metaloom.flows.formatting import plural, size
from metaloom.flows.results.disk import DiskUsage, bytes_freed, bytes_together
from metaloom.flows.views.parts import as_text, heading, new_table


def disk_view(usage: DiskUsage) -> RenderableType:
    """Show a row for each run, and with `details` its contents."""
    uses, paths, leftovers = usage.uses, usage.paths, usage.leftovers
    if not uses and not leftovers:
        return "no runs"
    table = new_table("run", ">on disk", ">shared with forks", ">freed by thinning", ">freed by removing", "")
    for use, path in zip(uses, paths, strict=True):
        known = size(use.thinning) if not use.problem else ""
        note = use.problem or (f"{size(use.only_remote)} not in the cache" if use.only_remote else "")
        table.add_row(use.name, size(use.num_bytes), size(use.shared), known, size(bytes_freed([path])), note)
    table.add_section()
    table.add_row("together", size(bytes_together(paths)))
    parts: list[RenderableType] = [table] if uses else []
    for use in uses if usage.details else ():
        ranges = {f"{first} to {last}": num_bytes for (first, last), num_bytes in (use.ranges or {}).items()}
        for what, sizes in (("group", use.groups), ("stage", use.stages), ("iteration", ranges)):
            if sizes:
                rows = ((name, size(num_bytes)) for name, num_bytes in sizes.items())
                parts += [heading(f"{use.name}, by {what}"), new_table(what, ">size", rows=rows)]
    if leftovers:
        left = plural(len(leftovers), "interrupted removal")
        parts.append(as_text(f"{left}, {size(bytes_together(leftovers))}: `metaloom rm` finishes that", "yellow"))
    return Group(*parts)
