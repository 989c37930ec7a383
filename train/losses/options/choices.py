"""Enumerations of the allowed values of objectives' options; the help text of an option explains its values."""

from enum import StrEnum

Similarity = StrEnum("Similarity", ["cosine", "dot"])
Duplicates = StrEnum("Duplicates", ["keep", "mask", "positive"])
Positives = StrEnum("Positives", ["single", "each", "exclude", "merge"])
CandidateSet = StrEnum("CandidateSet", ["all", "negatives", "list"])
Directions = StrEnum("Directions", ["sum", "mean", "x", "y"])
Partition = StrEnum("Partition", ["sum", "mean"])
Importance = StrEnum("Importance", ["none", "log_q", "zeta"])
Views = StrEnum("Views", ["stacked", "interleaved"])
Divergence = StrEnum("Divergence", ["kl", "chi2", "cvar"])
PairLoss = StrEnum("PairLoss", ["identity", "hinge", "squared_hinge", "logistic"])
Setting = StrEnum("Setting", ["supervised", "semi", "self"])
Nu = StrEnum("Nu", ["closed_form", "sgd", "state"])
Noise = StrEnum("Noise", ["batch", "uniform", "unigram", "file"])
Density = StrEnum("Density", ["unigram", "uniform", "file"])
TemperatureGradient = StrEnum("TemperatureGradient", ["paper", "fastclip"])
PairSet = StrEnum("PairSet", ["offdiag", "all"])
Matched = StrEnum("Matched", ["kl", "margin"])
Cov = StrEnum("Cov", ["first", "both"])
