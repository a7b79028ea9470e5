package launcher

// alike are things of which the same is to be said, by what that is. texts has what is said in the order in which it came first.
type alike[T any] struct {
	texts []string
	of    map[string][]T
}

func (a *alike[T]) add(text string, of T) {
	if a.of == nil {
		a.of = map[string][]T{}
	}
	if a.of[text] == nil {
		a.texts = append(a.texts, text)
	}
	a.of[text] = append(a.of[text], of)
}
