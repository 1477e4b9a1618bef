"""Settings: read once, from the environment or from files, and refused with their names."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lohan.errors import ConfigError, StorageError
from lohan_app import db
from lohan_app.db import create_db_engine, sqlite_is_safe
from lohan_app.settings import DATA_FOLDERS, Settings, load_settings


def test_lists_are_split_as_the_documentation_says(monkeypatch):
    monkeypatch.setenv("LOHAN_MODEL_DIRS", "/a:/b/c:")
    monkeypatch.setenv("LOHAN_ALLOWED_HOSTS", "box.lab, other ,")
    monkeypatch.setenv("LOHAN_DEVICES", "cpu:0")
    settings = load_settings()
    assert settings.model_dirs == (Path("/a"), Path("/b/c"))
    assert settings.allowed_hosts == ("box.lab", "other")
    assert settings.devices == ("cpu:0",)


def test_a_secret_may_come_from_a_file(monkeypatch, tmp_path: Path):
    (tmp_path / "url").write_text("postgresql+psycopg://u:pass word@host/db\n")
    monkeypatch.setenv("LOHAN_DATABASE_URL_FILE", str(tmp_path / "url"))
    settings = load_settings()
    assert settings.sqlalchemy_url == "postgresql+psycopg://u:pass word@host/db"
    assert "pass word" not in repr(settings)


def test_a_missing_secret_file_is_an_error_and_no_empty_secret(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("LOHAN_DATABASE_URL_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert caught.value.place == "LOHAN_DATABASE_URL_FILE" and str(tmp_path / "none") in caught.value.message


@pytest.mark.parametrize(("name", "value"), [("LOHAN_PORT", "99999"), ("LOHAN_PORT", "web"), ("LOHAN_UPLOAD_LIMIT_BYTES", "0")])
def test_a_bad_value_is_refused_with_its_name(monkeypatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert f"{name}={value!r}" in caught.value.message and "docs/settings.md" in str(caught.value.remedy)


def test_the_data_folder_is_private(tmp_path: Path):
    settings = Settings(data_dir=tmp_path / "data")
    settings.make_folders()
    for folder in (*(settings.data_dir / name for name in DATA_FOLDERS), *settings.state_folders):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


VERSIONS = {
    (3, 40, 1): False, (3, 44, 5): False, (3, 44, 6): True, (3, 45, 1): False, (3, 50, 6): False, (3, 50, 7): True,
    (3, 51, 2): False, (3, 51, 3): True, (3, 52, 0): False, (3, 53, 0): True, (3, 53, 4): True, (4, 0, 0): True,
}  # fmt: skip


@pytest.mark.parametrize(("version", "safe"), VERSIONS.items())
def test_sqlite_versions_with_the_write_ahead_log_fault_are_known(version: tuple[int, ...], safe: bool):
    assert sqlite_is_safe(version) is safe


def test_a_bad_sqlite_is_refused_with_the_remedy(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(db, "sqlite_is_safe", lambda _version: False)
    with pytest.raises(StorageError, match="can corrupt databases") as caught:
        create_db_engine(Settings(data_dir=tmp_path))
    assert "pysqlite3" in str(caught.value.remedy)
