"""The question–passage data set: file formats, questions, corpora of passages, BM25, answers, hard negatives."""
