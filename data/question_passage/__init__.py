"""The question–passage data set: file formats, questions, corpora of passages, BM25, answers, hard negatives. Also the
data sets of single texts (text_views.py) and of prompts with answers (prompts.py)."""
