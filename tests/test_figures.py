import sys

import pytest

from introspect import figures
from introspect.errors import FileAccessError, MissingPackageError, OptionError
from introspect.figures import Figure, Panel, Series, check_plot_path, save_figures

FIGURE = Figure(
    panels=(
        Panel(
            title="Sums",
            x_label="terms k",
            y_label="relative error",
            log_x=2,
            log_y=True,
            series=(
                Series(label="bf16", color=0, style="points", xy=((64, 0.01), (256, 0.02))),
                Series(label="", color=0, xy=((64, 0.01), (256, 0.02))),
                Series(label="limit", color=1, style="dashed", xy=((64, 0.1), (256, 0.4))),
            ),
        ),
        Panel(
            title="Kernels",
            x_label="",
            y_label="difference",
            series=(Series(label="measured", color=6, style="bars", xy=((0, 1.0), (1, 2.0))),),
            ticks=("in order", "last sixteen dropped"),
        ),
    ),
    caption="Marks: measured.",
)


def test_a_drawing_holds_every_title_label_and_legend(tmp_path):
    path = tmp_path / "f.svg"
    save_figures([FIGURE], str(path))
    text = path.read_text(encoding="utf-8")

    for words in ("Sums", "terms k", "relative error", "bf16", "limit", "last sixteen dropped", "Marks: measured."):
        assert f"<!-- {words} -->" in text  # matplotlib names each drawn text in a comment


def test_the_same_figure_is_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        save_figures([FIGURE], str(tmp_path / name))

    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_panels_of_several_figures_share_one_file(tmp_path):
    path = tmp_path / "f.svg"
    save_figures([FIGURE, FIGURE], str(path))

    assert path.read_text(encoding="utf-8").count("<!-- Kernels -->") == 2


def test_only_two_kinds_of_file_are_drawn():
    with pytest.raises(OptionError, match=r"^--plot: got 'f\.pdf', expected a file name ending in \.svg or \.png$"):
        check_plot_path("f.pdf")
    check_plot_path("f.PNG")


def test_a_missing_matplotlib_is_known_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError) as error:
        check_plot_path("f.svg")

    assert str(error.value) == ("--plot needs matplotlib, which is not installed: pip install 'torch-introspect[plot]'")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "missing" / "f.svg"
    with pytest.raises(FileAccessError, match="cannot write it: No such file or directory"):
        save_figures([FIGURE], str(path))


def test_colours_and_markers_are_all_different():
    assert len(set(figures._COLORS)) == len(set(figures._MARKERS)) == 7


def test_describing_a_figure_imports_no_matplotlib():
    import subprocess

    code = "import sys, introspect.figures; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
