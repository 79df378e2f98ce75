package csi_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every exported identifier of these packages has a doc comment that begins with its name.
func TestEveryExportedIdentifierIsDocumented(t *testing.T) {
	for _, directory := range []string{".", "dbus", "cgo", "csitest"} {
		sources, err := filepath.Glob(filepath.Join(directory, "*.go"))
		if err != nil || len(sources) == 0 {
			t.Fatal(directory, err)
		}
		for _, source := range sources {
			if strings.HasSuffix(source, "_test.go") {
				continue
			}
			text, err := os.ReadFile(source)
			if err != nil {
				t.Fatal(err)
			}
			for _, wrong := range undocumented(t, source, string(text)) {
				t.Error(wrong)
			}
		}
	}
}

func TestAMissingCommentIsFound(t *testing.T) {
	for source, want := range map[string]string{
		"package a\nfunc F() {}":                                  "a.go: F",
		"package a\n// Runs it.\nfunc F() {}":                     "a.go: F",
		"package a\ntype T struct{}":                              "a.go: T",
		"package a\n// T is one.\ntype T struct{ A int }":         "a.go: T.A",
		"package a\n// T is one.\ntype T interface{ M() }":        "a.go: T.M",
		"package a\n// T is one.\ntype T int\nfunc (t *T) M() {}": "a.go: M",
		"package a\n// All.\nconst (\nA = 1\n)":                   "a.go: A",
		"package a\n// F runs.\nfunc F() {}\nfunc g() {}":         "",
	} {
		if found := strings.Join(undocumented(t, "a.go", source), " "); found != want {
			t.Errorf("%q: found %q, want %q", source, found, want)
		}
	}
}

func undocumented(t *testing.T, path, text string) (found []string) {
	file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	begins := func(doc *ast.CommentGroup, name, as string) {
		word := regexp.MustCompile(`^` + regexp.QuoteMeta(name) + `\b`)
		if ast.IsExported(name) && !word.MatchString(doc.Text()) {
			found = append(found, path+": "+as)
		}
	}
	for _, declaration := range file.Decls {
		switch declaration := declaration.(type) {
		case *ast.FuncDecl:
			if declaration.Recv == nil || ast.IsExported(typeName(declaration.Recv.List[0].Type)) {
				begins(declaration.Doc, declaration.Name.Name, declaration.Name.Name)
			}
		case *ast.GenDecl:
			for _, spec := range declaration.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					begins(either(spec.Doc, declaration.Doc), spec.Name.Name, spec.Name.Name)
					if !ast.IsExported(spec.Name.Name) {
						continue
					}
					switch kind := spec.Type.(type) {
					case *ast.InterfaceType:
						for _, method := range kind.Methods.List {
							for _, name := range method.Names {
								begins(method.Doc, name.Name, spec.Name.Name+"."+name.Name)
							}
						}
					case *ast.StructType:
						found = append(found, unnamed(path, spec.Name.Name, kind)...)
					}
				case *ast.ValueSpec:
					doc := spec.Doc
					if !declaration.Lparen.IsValid() {
						doc = either(doc, declaration.Doc)
					}
					for _, name := range spec.Names {
						begins(doc, name.Name, name.Name)
					}
				}
			}
		}
	}
	return found
}

// A field is named by its own comment, or by the comment above the fields before it.
func unnamed(path, of string, fields *ast.StructType) (found []string) {
	doc := ""
	for _, field := range fields.Fields.List {
		if field.Doc != nil {
			doc = field.Doc.Text()
		}
		names := field.Names
		if names == nil {
			names = []*ast.Ident{{Name: typeName(field.Type)}}
		}
		for _, name := range names {
			word := regexp.MustCompile(`\b` + regexp.QuoteMeta(name.Name) + `\b`)
			if ast.IsExported(name.Name) && !word.MatchString(doc) {
				found = append(found, path+": "+of+"."+name.Name)
			}
		}
	}
	return found
}

func either(doc, other *ast.CommentGroup) *ast.CommentGroup {
	if doc != nil {
		return doc
	}
	return other
}

func typeName(of ast.Expr) string {
	switch of := of.(type) {
	case *ast.StarExpr:
		return typeName(of.X)
	case *ast.IndexExpr:
		return typeName(of.X)
	case *ast.SelectorExpr:
		return of.Sel.Name
	case *ast.Ident:
		return of.Name
	}
	return ""
}
