"""MAML-TRPO: MAML with a trust region. Finn et al. 2017, arXiv:1703.03400, section 5.3."""

from __future__ import annotations

from typing import Literal

from metaloom.pipeline.algorithms.maml.trust_region import TrustRegion


class MAMLTRPO(TrustRegion):
    """Policy-gradient inner steps, and a meta-update that bounds the KL after adaptation.

    Defaults are those of the ProMP authors' run scripts, but for the damping, which they leave out.
    """

    name: Literal["maml-trpo"] = "maml-trpo"
