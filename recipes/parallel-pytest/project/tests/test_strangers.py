"""Tests as a stranger might send them."""

import os
import pathlib
import shutil
import socket

import pytest

project = pathlib.Path(__file__).parent.parent


def test_ends_its_runner():
    os._exit(0)


def test_deletes_everything():
    shutil.rmtree(project)


def test_sets_a_trap():
    (project / "conftest.py").write_text("raise SystemExit('trapped')")
    (project / "shop.py").write_text("split = total = None")


def test_phones_home():
    with pytest.raises(OSError):
        socket.create_connection(("203.0.113.1", 443), timeout=10)


def test_finds_no_trap():
    assert project.joinpath("shop.py").exists() and not project.joinpath("conftest.py").exists()
