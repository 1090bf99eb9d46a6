"""How long a tactic takes, and how far that can be believed.

- :mod:`~synth.performance.routing` is how tokens spread over experts (:mod:`~synth.performance.routing_file` reads what
  a server counted), :mod:`~synth.performance.geometry` the rows and tiles that follow.
- :mod:`~synth.performance.roofline` is the analytic model, :mod:`~synth.performance.layers` fits it to whole layers,
  and :mod:`~synth.performance.analytical` has its constants for devices without timings.
- :mod:`~synth.performance.model` corrects it by forests: of :mod:`~synth.performance.cells`, by their
  :mod:`~synth.performance.features`, in a :mod:`~synth.performance.forest`; it is fitted by
  :mod:`~synth.performance.training` and kept by :mod:`~synth.performance.model_file`.
- :mod:`~synth.performance.posterior` takes in a few timings of a layer, by what predictions have in common
  (:mod:`~synth.performance.shared_errors`); :mod:`~synth.performance.outlook` says how good choices are believed to be,
  :mod:`~synth.performance.calibration` corrects that, and :mod:`~synth.performance.ties` picks among equals.
"""
