"""The question–passage data set: file formats, questions, corpora, BM25, answers, hard negatives."""
