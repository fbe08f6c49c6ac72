"""Names that commands import until they use cli/flags.py and cli/terminal.py themselves."""

from paceline.cli.flags import add_config_flags, add_sampling_flags, config_from_args, open_decoder, sampling_from_args
from paceline.cli.terminal import quiet_transformers

__all__ = [
    "add_config_flags",
    "add_sampling_flags",
    "config_from_args",
    "open_decoder",
    "quiet_transformers",
    "sampling_from_args",
]
