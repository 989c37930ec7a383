"""The processes of a run: how they meet, agree, average gradients, stay alike, and lose each other."""
