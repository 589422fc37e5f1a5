"""The one-sided exchange's rules on the order of its accesses, which `ep_moe.kernels.exchange.waits` explains."""

from compile_check.order import Acquire, AfterLaunch, Agree, AnyRule, Meet, Publish, Site, Stores, Strong

ROWS = Site(function="put_rows", kind="store")
FLAGS = Site(function="signal", kind="store")
WORDS = Site(function="put_word", kind="store")
RESULTS = Site(function="return_rows", kind="store", words="store_word(")
ABORTS = tuple(Site(function=function, kind="store") for function in ("put_abort", "troubles", "report_loss"))
REPORTS = tuple(Site(function="report", kind="store", words=words) for words in ("make_word", "news_ptr"))
BEGIN_COMBINE = {"begin_combine": frozenset({"relaxed", "gpu"})}  # on a word that no other rank accesses
COMMON: tuple[AnyRule, ...] = (
    AfterLaunch(name="early launch"),
    Publish(
        name="a report",
        rows=Site(function="report", kind="store", words="report_ptr + "),
        flag=Site(function="report", kind="store", words="make_word"),
    ),
)
RULES: dict[str, tuple[AnyRule, ...]] = {
    "_dispatch_kernel": (
        *COMMON,
        Agree(
            name="agreement",
            looks=("troubles", "load_aborts", "report", "clock"),
            reductions=("agree", "is_off", "report"),
        ),
        Strong(
            name="what changes meanwhile",
            functions=("troubles", "load_aborts", "wait_for_words", "report"),
            atomics={},
        ),
        Publish(name="rows and their flag", rows=ROWS, flag=FLAGS),
        Acquire(name="loads of rows", flags="wait_for_flag"),
        Stores(
            name="stores of a dispatch",
            words=(WORDS, FLAGS, *ABORTS, *REPORTS),
            results=(),
            others=(ROWS,),
        ),
        Meet(
            name="the state of a dispatch",
            read=Site(function="receive", kind="load", words="own.state_ptr + BEGUN"),
            written=Site(function="receive", kind="store", words="own.state_ptr + BEGUN"),
        ),
    ),
    "_combine_kernel": (
        *COMMON,
        Agree(
            name="agreement",
            looks=("troubles", "load_aborts", "report", "clock", "begin_combine"),
            reductions=("agree", "report", "begin_combine", "sum_rows"),
        ),
        Strong(
            name="what changes meanwhile",
            functions=("troubles", "load_aborts", "wait_for_words", "report", "begin_combine"),
            atomics=BEGIN_COMBINE,
        ),
        Acquire(name="loads of results", flags="", parts=("strong load",)),
        Stores(
            name="stores of a combine",
            words=(WORDS, *ABORTS, *REPORTS),
            results=(RESULTS,),
            others=(Site(function="sum_rows", kind="store"),),
        ),
        Meet(
            name="the state of a combine",
            read=Site(function="_is_before_resumption", kind="load", words="own.state_ptr + RESUME"),
            written=Site(function="_combine_kernel", kind="store", words="own.state_ptr + RESUME"),
        ),
        Meet(
            name="what has run of a combine",
            read=Site(function="begin_combine", kind="load", words="own.state_ptr + RUNS"),
            written=Site(function="begin_combine", kind="atomic", words="own.state_ptr + RUNS"),
        ),
    ),
}
