"""The question–passage data set: file formats, questions, corpora, hard negatives."""
