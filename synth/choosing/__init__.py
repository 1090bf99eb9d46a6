"""Which tactic, and what to time next: one story in five steps.

1. :mod:`~synth.choosing.plan` says which cells of some layers may be timed, in which order, and what that will cost.
   Where nothing is known of a device, :mod:`~synth.choosing.anchors` adds layers that teach what the others are like.
2. :mod:`~synth.choosing.rounds` picks what to time next from what was timed so far, as
   :mod:`~synth.choosing.picks` (the words in which a run and a strategy talk).
3. :mod:`~synth.choosing.sources` finds what to choose by: a fitted model or the analytic one, timings, and denials.
4. :mod:`~synth.choosing.choose` takes one tactic for each (shape, stage, bucket), and says why and how sure that is.
5. :mod:`~synth.choosing.emission` makes entries of the choices, with every key that an engine asks for, leaves out what
   may not beat the fallback, and turns them into the bytes of a config and its sidecar.
"""
