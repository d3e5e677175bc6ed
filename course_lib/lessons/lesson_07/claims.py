"""Claims that lesson 07 tests."""

from functools import partial

from course_lib.teaching.claims import claims_table, read_claims

#: Claims that learners may have read elsewhere, and that this lesson tests.
CLAIMS = read_claims(__file__, "claims")
#: Claims of the optional sections.
OLDER_CLAIMS = read_claims(__file__, "older_claims")
#: Functions that return a table of these claims. Their arguments are the measured values.
main_claims = partial(claims_table, CLAIMS)
older_claims = partial(claims_table, OLDER_CLAIMS)
