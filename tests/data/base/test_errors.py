"""What is said of an error."""

from dyad.data.base.errors import first_line


def test_the_advice_of_gloo_is_left_out() -> None:
    lost = "[tcp/pair.cc:545] Read error [127.0.0.1]:5: Connection reset by peer"
    advice = "This is typically caused by a remote worker hanging or bugs in the application. Check the logs. GLHF! 🏖️"
    assert first_line(RuntimeError(f"{lost}. {advice}\nmore")) == lost
