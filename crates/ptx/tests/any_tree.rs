//! Any syntax tree survives being printed and read: `parse(print(tree)) == tree`.

use dualgemm_ptx::ast::*;
use dualgemm_ptx::{Name, Space, Type, parse};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

fn name() -> impl Strategy<Value = Name> {
    "[%$a-zA-Z][a-zA-Z0-9_$]{0,6}".prop_map(Name::from)
}

fn modifier() -> impl Strategy<Value = Name> {
    "[a-z0-9_]{1,6}(::[a-z0-9_]{1,4}){0,2}".prop_map(Name::from)
}

/// A register or a component of one.
fn register() -> impl Strategy<Value = Name> {
    "[%$a-z][a-z0-9_]{0,5}([.][xyzw])?".prop_map(Name::from)
}

fn comment() -> impl Strategy<Value = String> {
    "[ -~]{0,16}".prop_map(|text| text.trim_end().to_string())
}

fn strings() -> impl Strategy<Value = Vec<String>> {
    vec("[ !#-~]{0,10}", 1..3)
}

/// PTX cannot write the most negative offset.
fn offset() -> impl Strategy<Value = i64> {
    (-i64::MAX..=i64::MAX).prop_filter("not zero", |&n| n != 0)
}

fn immediate() -> impl Strategy<Value = Immediate> {
    prop_oneof![
        any::<i64>().prop_map(Immediate::Int),
        any::<u64>().prop_map(Immediate::Hex),
        any::<u32>().prop_map(Immediate::F32),
        any::<u64>().prop_map(Immediate::F64),
    ]
}

fn address() -> impl Strategy<Value = Operand> {
    let base =
        prop_oneof![register().prop_map(AddressBase::Ident), any::<u64>().prop_map(AddressBase::Absolute)];
    (base, prop_oneof![Just(0), offset()], any::<bool>())
        .prop_map(|(base, offset, unified)| Operand::Address(Address { base, offset, unified }))
}

fn simple() -> impl Strategy<Value = Operand> {
    prop_oneof![
        register().prop_map(Operand::Ident),
        register().prop_map(Operand::Not),
        immediate().prop_map(Operand::Imm),
        (register(), offset()).prop_map(|(name, offset)| Operand::Offset(name, offset)),
        Just(Operand::Sink),
        address(),
    ]
}

fn operand() -> impl Strategy<Value = Operand> {
    simple().prop_recursive(3, 24, 4, |inner| {
        let first = prop_oneof![
            register().prop_map(Operand::Ident),
            (register(), offset()).prop_map(|(name, offset)| Operand::Offset(name, offset)),
        ];
        prop_oneof![
            vec(inner.clone(), 0..20).prop_map(Operand::Vector),
            vec(inner.clone(), 0..4).prop_map(Operand::Group),
            (first, vec(inner, 1..4)).prop_map(|(first, mut rest)| {
                rest.insert(0, first);
                Operand::List(rest)
            }),
            (simple(), simple()).prop_map(|(a, b)| Operand::Pair(Box::new(a), Box::new(b))),
        ]
    })
}

fn instruction() -> impl Strategy<Value = Instruction> {
    let guard = option::of((any::<bool>(), name()));
    (guard, name(), vec(modifier(), 0..5), vec(operand(), 0..5)).prop_map(
        |(guard, root, modifiers, operands)| {
            let guard = guard.map(|(negated, register)| Guard { negated, register });
            Instruction { line: Line(0), guard, root, modifiers, operands }
        },
    )
}

fn ty() -> impl Strategy<Value = Type> {
    select(Type::ALL)
}

fn power() -> impl Strategy<Value = Option<u32>> {
    option::of((0u32..31).prop_map(|n| 1 << n))
}

fn init() -> impl Strategy<Value = Init> {
    let leaf = prop_oneof![
        immediate().prop_map(Init::Value),
        (name(), -i64::MAX..i64::MAX).prop_map(|(name, offset)| Init::Symbol(name, offset)),
        (name(), -i64::MAX..i64::MAX).prop_map(|(name, offset)| Init::Generic(name, offset)),
    ];
    leaf.prop_recursive(2, 8, 4, |inner| vec(inner, 0..4).prop_map(Init::List))
}

fn variable(spaces: &'static [Space], linked: bool, with_init: bool) -> impl Strategy<Value = Variable> {
    let linkage = select(if linked {
        &[Linkage::Internal, Linkage::Extern, Linkage::Visible][..]
    } else {
        &[Linkage::Internal]
    });
    let pointer = option::of((option::of(select(&[Space::Global, Space::Shared][..])), power()))
        .prop_map(|p| p.map(|(space, align)| Pointer { space, align }));
    let attribute = option::of(Just(Name::from(".managed")));
    let init = if with_init { option::of(init()).boxed() } else { Just(None).boxed() };
    let shape =
        (select(spaces), linkage, attribute, power(), option::of(select(&[2u8, 4, 8][..])), ty(), pointer);
    (shape, name(), vec(option::of(any::<u64>()), 0..3), init).prop_map(
        |((space, linkage, attribute, align, vector, ty, pointer), name, dims, init)| Variable {
            line: Line(0),
            linkage,
            space,
            attribute,
            align,
            vector,
            ty,
            pointer,
            name,
            dims,
            init,
        },
    )
}

fn params() -> impl Strategy<Value = Vec<Variable>> {
    vec(variable(&[Space::Param, Space::Reg], false, false), 0..3)
}

fn statement() -> impl Strategy<Value = Statement> {
    let names = || vec(name(), 1..4);
    let reg = (option::of(select(&[2u8, 4][..])), ty(), vec((name(), option::of(any::<u32>())), 1..3))
        .prop_map(|(vector, ty, names)| Statement::Reg(RegDecl { line: Line(0), vector, ty, names }));
    let prototype =
        (name(), params(), params(), any::<bool>()).prop_map(|(name, returns, params, noreturn)| {
            Statement::CallPrototype(Prototype { name, returns, params, noreturn })
        });
    let leaf = prop_oneof![
        8 => instruction().prop_map(Statement::Instruction),
        1 => comment().prop_map(Statement::Comment),
        1 => reg,
        1 => variable(&[Space::Shared, Space::Local, Space::Param], false, true).prop_map(Statement::Variable),
        1 => name().prop_map(|name| Statement::Label(Line(0), name)),
        1 => strings().prop_map(Statement::Pragma),
        1 => (name(), names()).prop_map(|(name, targets)| Statement::BranchTargets(name, targets)),
        1 => (name(), names()).prop_map(|(name, targets)| Statement::CallTargets(name, targets)),
        1 => prototype,
    ];
    leaf.prop_recursive(3, 12, 4, |inner| vec(inner, 0..4).prop_map(Statement::Block))
}

fn function() -> impl Strategy<Value = Function> {
    let directive = prop_oneof![
        (select(&["maxntid", "reqntid", "explicitcluster", "noreturn"][..]), vec(any::<u64>(), 0..4))
            .prop_map(|(name, values)| Directive::Numeric(name.into(), values)),
        strings().prop_map(Directive::Pragma),
    ];
    let body = option::of(vec(statement(), 0..8));
    (any::<bool>(), name(), params(), params(), vec(directive, 0..3), body).prop_map(
        |(entry, name, returns, params, directives, body)| Function {
            line: Line(0),
            linkage: Linkage::Visible,
            kind: if entry { FunctionKind::Entry } else { FunctionKind::Device },
            attribute: None,
            returns: if entry { Vec::new() } else { returns },
            name,
            params,
            directives,
            body,
        },
    )
}

fn module() -> impl Strategy<Value = Module> {
    let spaces = &[Space::Global, Space::Const, Space::Shared, Space::Local];
    let item = prop_oneof![
        comment().prop_map(Item::Comment),
        variable(spaces, true, true).prop_map(Item::Variable),
        function().prop_map(Item::Function),
        strings().prop_map(Item::Pragma),
        (name(), name()).prop_map(|(name, target)| Item::Alias(name, target)),
    ];
    let version = (any::<u16>(), any::<u16>()).prop_map(|(major, minor)| Version { major, minor });
    let size = option::of(select(&[32u32, 64][..]));
    (vec(comment(), 0..3), version, vec(name(), 1..3), size, vec(item, 0..5)).prop_map(
        |(header, version, target, address_size, items)| Module {
            header,
            version,
            target,
            address_size,
            items,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_module_reads_back_equal(module in module()) {
        let text = module.to_string();
        match parse::module(&text) {
            Ok(read) => prop_assert!(read == module, "{}\nread as\n{}", text, read),
            Err(error) => prop_assert!(false, "{}\n{}", error, text),
        }
    }
}
