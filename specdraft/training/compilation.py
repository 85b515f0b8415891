"""DeepSpeed compiles some of its operators at their first use; a process that was killed meanwhile must stop nobody."""

from pathlib import Path

from torch.utils import cpp_extension

from specdraft.files import exclusive


def compile_operator(builder: str) -> None:
    """Compile and load the operator of DeepSpeed's ``builder``, one process at a time. torch waits without end for a
    lock file that a killed process leaves in its cache; the kernel takes ours from a process that ends, so whoever
    holds it knows that nobody else of us is compiling."""
    from deepspeed.accelerator import get_accelerator  # imports take seconds

    made = get_accelerator().create_op_builder(builder)
    if made is None or not made.is_compatible():
        return  # DeepSpeed does without
    folder = Path(cpp_extension._get_build_directory(made.name, verbose=False))
    with exclusive(folder.parent / f".{made.name}.lock"):
        (folder / "lock").unlink(missing_ok=True)
        made.load()
