"""A file that becomes a link after a download listed it is not sent."""

from pathlib import Path

import pytest
from headrace_coordinator.api.http.downloads import _entries, _pieces


def test_a_file_swapped_for_a_link_after_the_listing_is_not_sent(tmp_path: Path) -> None:
    folder, secret = tmp_path / "checkpoint", tmp_path / "token"
    folder.mkdir()
    secret.write_bytes(b"secret")
    (folder / "weights").write_bytes(b"public")
    entries = _entries(folder, "checkpoint")
    (folder / "weights").unlink()
    (folder / "weights").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        list(_pieces(entries))
