"""figures.py: pictures from real files, and what is no log is named."""
import pytest

import figures


def test_curve(tmp_path, monkeypatch):
    log = tmp_path / "log.csv"
    log.write_text("step,solved,length_mean,eval_solved,eval_length\n0,0.25,50,0.5,40\n1,0.75,60,,\n2,,,1.0,90\n", encoding="utf-8")
    assert figures.read_log(log) == dict(solved=[(0, 0.25), (1, 0.75)], length_mean=[(0, 50), (1, 60)], eval_solved=[(0, 0.5), (2, 1.0)],
                                         eval_length=[(0, 40), (2, 90)])
    monkeypatch.setattr(figures, "logs", f"{log},{log}")
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        monkeypatch.setattr(figures, "out", str(tmp_path / f"curve{suffix}"))
        figures.curve()
        assert (tmp_path / f"curve{suffix}").read_bytes().startswith(magic)
    monkeypatch.setattr(figures, "labels", "one")
    with pytest.raises(ValueError, match="1 names for 2 logs"):
        figures.curve()


@pytest.mark.parametrize("text, says", [("", "has no rows"), ("step,solved\n", "has no rows"), ("step,solved\n1,x\n", "line 2: not a row"),
                                        ("a,b\n1,2\n", "line 2: not a row"), ("step,solved\n1,2,3\n", "line 2: not a row")])
def test_what_is_no_log(tmp_path, text, says):
    log = tmp_path / "log.csv"
    log.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        figures.read_log(log)
