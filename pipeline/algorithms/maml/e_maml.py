"""E-MAML: MAML-TRPO that credits exploration. Stadie et al. 2018, arXiv:1803.01118."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from metaloom.pipeline.algorithms.maml.trust_region import TrustRegion


class EMAML(TrustRegion):
    """MAML-TRPO in which the policies before adaptation are credited for the rewards after it.

    Defaults are those of the ProMP authors' run script.
    """

    name: Literal["e-maml"] = "e-maml"
    exploration: bool = True
    """Always on: without it this is maml-trpo."""

    @model_validator(mode="after")
    def _explores(self) -> EMAML:
        if not self.exploration:
            raise ValueError("exploration is off, and e-maml without it is maml-trpo; use algorithm.name=maml-trpo")
        return self
