"""Claims that lesson 05 tests."""

from functools import partial

from course_lib.teaching.claims import claims_table, read_claims

#: Claims that learners may have read. The last two are only in the teaching documents from which
#: the course was developed.
CLAIMS = read_claims(__file__, "claims")
#: Claim of the section about updates inside backward.
OLDER_CLAIMS = read_claims(__file__, "older_claims")

#: Return a table of `OLDER_CLAIMS`. The argument is AdamA's second moments divided by Adam's.
older_claims = partial(claims_table, OLDER_CLAIMS)
