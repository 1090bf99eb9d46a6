"""The commands, by what they are about. They import what they need when they run, so that ``--help`` is quick."""
