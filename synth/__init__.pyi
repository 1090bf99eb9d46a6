from synth.catalog.checkpoints import layer as layer
from synth.checking.check import check as check
from synth.choosing.answers import choose as choose
from synth.choosing.answers import emit as emit
from synth.choosing.answers import predict as predict
from synth.configs.porting import port as port
from synth.configs.reading import read as read_config
from synth.timings.folders import load_timings as load_timings

__version__: str
__all__ = ["__version__", "check", "choose", "emit", "layer", "load_timings", "port", "predict", "read_config"]
