"""Claims that lesson 03 tests."""

from functools import partial

from course_lib.teaching.claims import claims_table, read_claims

#: Claims that learners may have read elsewhere, and that this lesson tests.
CLAIMS = read_claims(__file__, "claims")
#: Claims found only in the teaching documents from which the course was developed.
OLDER_CLAIMS = read_claims(__file__, "older_claims")
#: Function that returns a table of `OLDER_CLAIMS`. Its arguments are the measured values.
older_claims = partial(claims_table, OLDER_CLAIMS)
