"""Compiles every Triton kernel of the package without a GPU, and checks the machine code.

    PYTHONPATH=tests python -m compile_check

runs all cases for sm_90 and sm_100, prints a table and a line for each finding, and exits with 1 if there are any.
`--target 89` runs them for another one, of 80, 86, 89 and 120, with its limits, and so with the tiles for it;
`--target gfx942`, or gfx950, those for AMD's GPUs: all but Gluon, by the rules case, spill, shared, tensor_core,
loaded_again and weak. It needs no GPU and a process without TRITON_INTERPRET. A case calls real launchers with
tensors of real sizes, so that kernels are compiled with the alignments and options of real runs. The rules and their
findings:

    case         a kernel that no case launches, any other jit function that no launched kernel calls, a module that
                 does not import, a launcher or a compilation that fails
    spill        registers that spill to local memory; of targets and versions of Triton that no tile was
                 measured with they are listed
    loop_spill   the same within a loop over products, in a kernel of Gluon, whose partitions divide the registers
    many_spills  more than 16 stores to local memory, in such a kernel
    shared       more shared memory than a block may have
    tensor_core  a product of fp8 operands, or of operands widened from fp8, without the tensor core's fp8 instructions;
                 a product of 16-bit operands without a tensor core, or without the instructions of a warp group where
                 its tile is large enough for them
    narrow       a load or store of a block of 1-byte or 2-byte elements that is narrower than `MINIMUM_WIDTH_BYTES`.
                 Exempt are loads and stores of one element, and loads of 2-byte vectors with at most one element per
                 thread, such as a bias. The rule does not see payload that is copied as words; for it a case says how
                 wide a kernel's widest access must be
    order        an access to memory that ranks share without the barrier, fence, scope or semantics that it needs:
                 checked on the PTX along every path through a kernel. `order` has the rules, `exchange_order` names
                 the exchange's accesses, and `mutants` changes its kernels so that each rule finds something
    loaded_again a volatile load that Triton has made several: it loads a tensor of fewer elements than threads once for
                 each layout that it is used in. A peer may write between them, and one may be compared, another used
    weak         a store by a function `publish`, which is for what others poll, that is not strong at system scope in
                 the machine code: Triton has no scoped stores, and the exchange relies on what `.wt` becomes.
                 For AMD's GPUs a volatile load without `.cv`, which their compiler takes from caches

--share 1/4 compiles every fourth case from the second on, as CI does with another one for each commit; of the others
only the launchers run. A case may excuse a kernel from a rule, with a reason; an unused excuse is itself a finding.
"""
