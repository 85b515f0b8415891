"""``specdraft import PATH --target NAME``: a public drafter, as engines load it, becomes a checkpoint."""

import argparse
from pathlib import Path

from specdraft.errors import UserError, exit_on_user_error


@exit_on_user_error
def main() -> None:
    """Read the command line, import, and say where the checkpoint is."""
    about = (
        "A public drafter, as engines load it, becomes a checkpoint: EAGLE-1 and 3, P-EAGLE, Medusa, MTP, DFlash, "
        "DSpark, ReDrafter, and any small causal model as a draft model."
    )
    parser = argparse.ArgumentParser(prog="specdraft import", description=about)
    parser.add_argument("path", type=Path, help="a directory with config.json and weights of a drafter")
    parser.add_argument("--target", required=True, help="hub id, directory or embedded://tiny")
    parser.add_argument("--revision", help="the target's, where it is a hub id")
    parser.add_argument("--dtype", default="auto", help="in which the target is loaded (auto: its own)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its code")
    parser.add_argument("--layers", type=int, nargs="+", metavar="K", help="hidden states after K layers")
    parser.add_argument("--output", type=Path, default=Path("drafter"), help="the checkpoint's directory")
    options = parser.parse_args()

    # Imported here so that --help answers at once.
    from specdraft.drafters.checkpoint import about_target, save_drafter
    from specdraft.export.importing import import_head
    from specdraft.export.provenance import check_provenance
    from specdraft.targets import Target

    if options.output.exists():
        raise UserError(f"{options.output} exists: expected a new directory; choose one with --output")
    source = (options.target, options.revision, options.dtype)
    target = Target.load(*source, device="cpu", trust_remote_code=options.trust_remote_code)
    said = check_provenance(options.path, target).get("extra", {}).get("target", {})
    head = import_head(options.path, target, options.layers)
    if head.quantization is not None:
        kept = "of which the checkpoint computes with the same codes and scales"
        print(f"quantized: the files hold {head.quantization} weights, {kept}")
    # Of a head of others nobody knows with which template it was trained.
    known = about_target(target) | {key: said.get(key) for key in ("chat_template_hash", "chat_template_options")}
    extra = {"target": known, "imported_from": str(options.path)}
    print(f"checkpoint: {save_drafter(head, options.output, target.identity, extra)}")


if __name__ == "__main__":
    main()
