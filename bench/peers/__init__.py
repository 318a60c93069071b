"""The programs Twinplane is measured against: optional, in environments of their own, not ours."""
