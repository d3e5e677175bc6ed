"""Claims that lesson 09 tests."""

from course_lib.teaching.claims import read_claims

#: Claims that learners may have read elsewhere, and that this lesson tests.
CLAIMS = read_claims(__file__, "claims")
